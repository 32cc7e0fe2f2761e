"""The base of all errors in what a user gives: a configuration, a record, a folder."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: one sentence with field, value and rule, which the command line prints before it exits with code 2."""
