"""Claims of papers, each tested on runs by comparing settings seed by seed; `table` lists them."""

from raysim.analysis.claims.claim import HARM, Claim, Contrast, Margins, Measure, Part, Parts, no_harm
from raysim.analysis.claims.table import CLAIMS
from raysim.config.identity import Setting

__all__ = ["CLAIMS", "HARM", "Claim", "Contrast", "Margins", "Measure", "Part", "Parts", "Setting", "no_harm"]
