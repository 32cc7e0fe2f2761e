"""Comparisons of settings: the runs that may be compared, and the rule of verdicts."""
