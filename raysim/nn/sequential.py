"""Links inserted into an `nn.Sequential` at named layers, as raysim cuts it into stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from raysim.nn.link import CompressedLink


def insert_links(
    model: nn.Sequential,
    cuts: Sequence[str],
    *,
    forward: str | Sequence[str] = "Identity",
    backward: str | Sequence[str] = "Identity",
    num_microbatches: int = 1,
    shared_indices: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """Return a Sequential of the same layers, under the same names, with a `CompressedLink` after each layer named in `cuts`.

    `forward` and `backward` are one notation for all links, or a list with one for each. The links are named `link0`,
    `link1`, ... With the cuts, seed and microbatches of a run of `raysim.train` they send the same bits.

    Raises ValueError if a cut is not a layer of the model, or is its last one.

    >>> model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 2)))
    >>> list(dict(insert_links(model, ["first"], forward="TopK(0.5)").named_children()))
    ['first', 'link0', 'second']
    """
    layers = dict(model.named_children())
    check_cuts(list(layers), cuts)
    notations = [[value] * len(cuts) if isinstance(value, str) else list(value) for value in (forward, backward)]
    for field, given in zip(("forward", "backward"), notations, strict=True):
        if len(given) != len(cuts):
            raise ValueError(
                f"`{field}` must be one notation or a list with one per cut ({len(cuts)}), but got {len(given)}."
            )
    linked: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in layers.items():
        linked[name] = layer
        if name in cuts:
            boundary = list(cuts).index(name)
            linked[f"link{boundary}"] = CompressedLink(
                notations[0][boundary],
                backward=notations[1][boundary],
                boundary=boundary,
                num_microbatches=num_microbatches,
                shared_indices=shared_indices,
                seed=seed,
            )
    return nn.Sequential(linked)


def check_cuts(names: Sequence[str], cuts: Sequence[str]) -> None:
    """Raise ValueError unless `cuts` are names of layers, in their order, each once and none the last."""
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"`cuts` must name layers of the model ({', '.join(names)}), but got {cut!r}.")
    if not cuts or list(cuts) != sorted(set(cuts), key=list(names).index) or cuts[-1] == names[-1]:
        raise ValueError(
            f"`cuts` must name layers in the model's order, each once and none the last, but got {', '.join(cuts) or 'none'}."
        )
