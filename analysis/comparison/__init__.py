"""Comparisons of settings: which runs may be set against each other, and the rule by which verdicts are given."""
