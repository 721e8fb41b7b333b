"""Figures, drawn from stored results only; they never train, and fail on a missing point."""
