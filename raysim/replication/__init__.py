"""Methods by which the replicas of a stage average their gradients or parameters.

To add a method, write a class and add it to `METHODS`; the property tests then require an example of it.
"""

from raysim.codecs import CODECS
from raysim.compressors.memory import ErrorFeedback, MixedErrorFeedback
from raysim.notation import Notation, parse_notation
from raysim.replication.accordion import Accordion
from raysim.replication.gathered import Gathered, ReplicaEF21, TwoShot, as_method
from raysim.replication.gravac import GraVAC
from raysim.replication.local import DiLoCo, SparseLoCo
from raysim.replication.low_rank import PowerGossip, PowerSGD
from raysim.replication.method import Averaged, ReplicaContext, ReplicaMethod, RoundPackets
from raysim.replication.sparsified import DGC, RedSync

METHODS: dict[str, type[ReplicaMethod]] = {
    cls.name(): cls
    for cls in (
        Accordion,
        DGC,
        DiLoCo,
        ReplicaEF21,
        Gathered,
        GraVAC,
        PowerGossip,
        PowerSGD,
        RedSync,
        SparseLoCo,
        TwoShot,
    )
}


def parse_replica_method(text: str) -> ReplicaMethod:
    """Parse the notation of a replica method; the inverse of `repr`. A bare codec or compressor means `Gathered`.

    Raises ValueError listing the known names if the text is not a replica method.

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
    "RoundPackets",
    "parse_replica_method",
]
