"""Replication: how the replicas of a stage agree on one gradient.

A new method is a class and a line in `METHODS`; the tests of laws then require a variant of it.
"""

from raysim.codecs import CODECS
from raysim.compressors.memory import ErrorFeedback, MixedErrorFeedback
from raysim.notation import Notation
from raysim.notation import parse as parse_notation
from raysim.replication.accordion import Accordion
from raysim.replication.blocks import DeMo, SparseLoCo
from raysim.replication.differences import DIANA, MARINA, ReplicaEF21
from raysim.replication.gathered import Gathered, SignSGD, TwoShot, as_method
from raysim.replication.gravac import ReplicaGraVAC
from raysim.replication.local import SPARTA, DiLoCo, MuLoCo, StreamingDiLoCo
from raysim.replication.low_rank import PowerGossip, PowerSGD
from raysim.replication.method import Averaged, ReplicaContext, ReplicaMethod, Round, average_together
from raysim.replication.sparsified import DGC, GTopK, RedSync

METHODS: dict[str, type[ReplicaMethod]] = {
    cls.name(): cls
    for cls in (
        Accordion,
        DeMo,
        DGC,
        DIANA,
        DiLoCo,
        ReplicaEF21,
        Gathered,
        ReplicaGraVAC,
        GTopK,
        MARINA,
        MuLoCo,
        PowerGossip,
        PowerSGD,
        RedSync,
        SignSGD,
        SparseLoCo,
        SPARTA,
        StreamingDiLoCo,
        TwoShot,
    )
}


def parse_replica_method(text: str) -> ReplicaMethod:
    """Return the replica method of a notation: the inverse of `repr`. A codec or compressor alone means `Gathered`.

    Raises ValueError, with the known names, if it is none.

    >>> parse_replica_method("Identity"), parse_replica_method("ErrorFeedback(TopK(0.01))")
    (Identity, ErrorFeedback(TopK(0.01)))
    """
    memories: dict[str, type[Notation]] = {cls.name(): cls for cls in (ErrorFeedback, MixedErrorFeedback)}
    names: dict[str, type[Notation]] = {**CODECS, **memories, **METHODS}
    result = parse_notation(text, names, kind="replica method")
    method = as_method(result)
    assert method is not None
    return method


__all__ = [
    "METHODS",
    "Averaged",
    "ReplicaContext",
    "ReplicaMethod",
    "Round",
    "average_together",
    "parse_replica_method",
]
