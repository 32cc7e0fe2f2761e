"""What is said where something cannot be had: one sentence."""


class AnalysisError(ValueError):
    """What was asked for cannot be had from these records: one sentence with what is wrong."""


class ReplayError(AnalysisError):
    """A run cannot be replayed as asked: one sentence with what is wrong."""
