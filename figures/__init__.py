"""Figures, drawn from stored results only; they never train, and fail on a missing point."""

import matplotlib

matplotlib.use("Agg")  # no figure needs a screen
