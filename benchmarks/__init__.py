"""Timings, A against B in one run.  Absolute times are this machine's; compare ratios."""
