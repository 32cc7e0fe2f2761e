"""RedSync: a threshold found by search, and messages of one sign that need a single value."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from raysim.codecs import Codec, EstimatedTopK, Mean, Nonzero, TopK
from raysim.codecs.message import Entry
from raysim.notation import check_choice, check_real
from raysim.replication.base import Averaged, Gradients, Memory, Received, ReplicaContext, Round
from raysim.replication.layers import Layered, gather_mean, key_of, remembered


@dataclass(frozen=True, repr=False)
class RedSync(Layered):
    """Sends about the share `density` of gradient plus residual, above a threshold found by search (Fang et al. 2019, 1808.04357).

    `search` "binary": between mean and greatest magnitude, until k to 2k values pass. "trimmed": the threshold is lowered until
    k pass, of which the k greatest are kept; the result is TopK's, which is what runs. `same_sign`: only positive values are sent
    in even steps and negative ones in odd steps, all as their mean: positions and one value.
    """

    density: float
    search: str = "binary"
    same_sign: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("search", self.search, ["binary", "trimmed"])
        if not isinstance(self.same_sign, bool):
            raise ValueError(f"`same_sign` must be True or False, but got {self.same_sign!r}.")

    @property
    def _codec(self) -> Codec:
        return EstimatedTopK(self.density, "bisect") if self.search == "binary" else TopK(self.density)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(Nonzero(Mean()) if self.same_sign else self._codec),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * self.compressed_values(shapes)

    def compress(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        packets, moved = {}, dict(memory)
        for name, gradient in gradients.items():
            fed = (gradient + remembered(memory, "residual", name, gradient)).view(1, -1)
            key = key_of(name, context)
            if self.same_sign:
                one_sign = fed.clamp_min(0) if context.step % 2 == 0 else fed.clamp_max(0)
                selected = self._codec.encode(one_sign, key).decode(fed.device)
                packets[name] = Nonzero(Mean()).encode(selected)
            else:
                packets[name] = self._codec.encode(fed, key)
            moved[f"residual/{name}"] = (fed - packets[name].decode(fed.device)).view_as(gradient)
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        averaged = {name: means[name].view_as(gradient) for name, gradient in gradients.items()}
        return Averaged(averaged, moved)
