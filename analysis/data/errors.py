"""Errors raised when the records cannot answer a question."""


class AnalysisError(ValueError):
    """The records cannot answer a question; the message is one sentence with the cause."""


class ReplayError(AnalysisError):
    """A run cannot be replayed as asked; the message is one sentence with the cause."""
