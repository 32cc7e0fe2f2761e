"""Records of runs and studies: folders, files, settings and recordings, and the errors for unusable records."""

from raysim.notation import InputError


class AnalysisError(InputError):
    """The records cannot answer a question; the message is one sentence with the cause."""


class ReplayError(AnalysisError):
    """A run cannot be replayed; the message is one sentence with the cause."""
