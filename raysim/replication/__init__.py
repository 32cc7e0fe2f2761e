"""Replication: how the replicas of a stage agree on one gradient.

Adding a method is a class, and a line in `METHODS`; the laws in the tests then ask for a variant of it.
"""

from raysim.codecs import CODECS, Codec, Identity
from raysim.compressors.feedback import ErrorFeedback, MixedErrorFeedback
from raysim.notation import Notation
from raysim.notation import parse as parse_notation
from raysim.replication.accordion import Accordion
from raysim.replication.base import ReplicaMethod
from raysim.replication.dgc import DGC
from raysim.replication.differences import DIANA, MARINA, ReplicaEF21
from raysim.replication.gathered import Dense, Gathered
from raysim.replication.gravac import ReplicaGraVAC
from raysim.replication.gtopk import GTopK
from raysim.replication.powergossip import PowerGossip
from raysim.replication.powersgd import PowerSGD
from raysim.replication.redsync import RedSync
from raysim.replication.signsgd import SignSGD

METHODS: dict[str, type[ReplicaMethod]] = {
    cls.name(): cls
    for cls in (
        Accordion,
        DGC,
        DIANA,
        ReplicaEF21,
        Gathered,
        ReplicaGraVAC,
        GTopK,
        MARINA,
        PowerGossip,
        PowerSGD,
        RedSync,
        SignSGD,
    )
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


__all__ = ["METHODS", "ReplicaMethod", "parse_replica_method"]
