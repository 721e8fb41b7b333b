"""Runnable studies, one question each: a frozen design, points, a results folder, a table."""
