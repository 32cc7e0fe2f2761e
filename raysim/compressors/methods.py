"""The methods that average replica gradients, by the names under which they are written."""

from raysim.codecs import CODECS, Codec, Identity
from raysim.compressors.accordion import Accordion
from raysim.compressors.differences import DIANA, EF21, MARINA
from raysim.compressors.feedback import ErrorFeedback, MixedErrorFeedback
from raysim.compressors.gathered import Dense, Gathered
from raysim.compressors.gossip import PowerGossip
from raysim.compressors.gravac import GraVAC
from raysim.compressors.gtopk import GTopK
from raysim.compressors.momentum import DGC
from raysim.compressors.powersgd import PowerSGD
from raysim.compressors.redsync import RedSync
from raysim.compressors.replica import ReplicaMethod
from raysim.compressors.votes import SignSGD
from raysim.notation import Notation
from raysim.notation import parse as parse_notation

METHODS: dict[str, type[ReplicaMethod]] = {
    cls.name(): cls
    for cls in (Accordion, DGC, DIANA, EF21, Gathered, GraVAC, GTopK, MARINA, PowerGossip, PowerSGD, RedSync, SignSGD)
}


def parse_replica_method(text: str) -> ReplicaMethod:
    """Return the replica method that `text` writes: the inverse of `repr`. A codec or compressor alone means `Gathered`.

    Raises ValueError, with the known names, where it is none.

    >>> parse_replica_method("Identity"), parse_replica_method("ErrorFeedback(TopK(0.01))")
    (Identity, ErrorFeedback(TopK(0.01)))
    """
    memories: dict[str, type[Notation]] = {cls.name(): cls for cls in (ErrorFeedback, MixedErrorFeedback)}
    names: dict[str, type[Notation]] = {**CODECS, **memories, **METHODS}
    result = parse_notation(text, names, kind="replica method")
    if isinstance(result, ReplicaMethod):
        return result
    if isinstance(result, Identity):
        return Dense()
    assert isinstance(result, (Codec, ErrorFeedback, MixedErrorFeedback))
    return Gathered(result)  # type: ignore[arg-type]  # a codec becomes Plain there
