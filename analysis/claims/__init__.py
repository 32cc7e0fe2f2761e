"""The claims of papers that runs are asked about, each as comparisons of settings seed by seed: the table is in `table`."""

from raysim.analysis.claims.claim import Claim, Contrast, Margins, Part, Parts, no_harm
from raysim.analysis.claims.measures import Degradation, Freed, Saving, Slowdown, ValueFactor
from raysim.analysis.claims.table import CLAIMS
from raysim.analysis.data.settings import Setting

__all__ = [
    "CLAIMS",
    "Claim",
    "Contrast",
    "Degradation",
    "Freed",
    "Margins",
    "Part",
    "Parts",
    "Saving",
    "Setting",
    "Slowdown",
    "ValueFactor",
    "no_harm",
]
