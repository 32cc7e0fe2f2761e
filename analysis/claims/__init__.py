"""The claims of papers that runs are asked about, each as comparisons of settings seed by seed.

Another claim is one entry in the list of its subject. Harm is how much worse the final quality is: in points of accuracy, or per
cent of the loss. "Does no harm" means surely below the margin: a difference that was not found is not enough. Models at chance
bear on no claim about quality.

GraVAC's claim on multi-level compression is left out: it saves compression time beside a variant that raysim does not have.
"""

from raysim.analysis.claims import asynchronous, model_parallel, optimus_cc, replicas
from raysim.analysis.claims.claim import Claim, Contrast
from raysim.analysis.claims.measures import Degradation, Freed, Saving, Slowdown, ValueFactor

CLAIMS: tuple[Claim, ...] = (
    *model_parallel.CLAIMS,
    *replicas.CLAIMS,
    *optimus_cc.CLAIMS,
    *asynchronous.CLAIMS,
)

__all__ = ["CLAIMS", "Claim", "Contrast", "Degradation", "Freed", "Saving", "Slowdown", "ValueFactor"]
