"""The claims of papers that runs are asked about, each as comparisons of settings seed by seed: the table is in `table`."""

from raysim.analysis.claims.claim import Claim, Contrast, Margins, Part, Parts, no_harm
from raysim.analysis.claims.measures import HARM, Measure
from raysim.analysis.claims.table import CLAIMS
from raysim.analysis.data.settings import Setting

__all__ = ["CLAIMS", "HARM", "Claim", "Contrast", "Margins", "Measure", "Part", "Parts", "Setting", "no_harm"]
