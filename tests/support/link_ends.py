"""The sending end of a link."""

import torch
from codec_variants import student
from compressor_variants import context
from torch import Tensor

from raysim.compressors import LinkGraVAC, StepFacts
from raysim.pipeline.link import Link


class Sender:
    """The sending end of a link, over steps of some messages."""

    def __init__(
        self, method: LinkGraVAC, messages: int = 2, direction: str = "forward", boundary: int = 0, stages: int = 2
    ) -> None:
        self.link = Link(method, boundary, direction, sender=True, device=torch.device("cpu"))
        self.messages, self.told = messages, {"direction": direction, "num_stages": stages}
        self.packets: list = []

    def step(self, step: int, scale: float = 1.0, step_s: float | None = 1.0, floor: float | None = None, x=None):
        self.packets = []
        for i in range(self.messages):
            message = x(step, i) if x else scale * student(2, 10, 8, seed=10 * step + i)
            sent = self.link.send(message, context(step, i, ids=(0, 1), **self.told))
            self.packets.append(self.link.unpack(sent))
        (decision,) = self.link.end_step(StepFacts(step_s, floor, batch_size=32)).decisions
        return decision


def same(step: int, i: int) -> Tensor:
    return student(2, 10, 8, seed=i)
