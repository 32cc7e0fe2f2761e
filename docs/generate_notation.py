"""Write docs/notation.md: every codec, compressor, replica method, schedule and weight policy, from the classes themselves.

Run `make notation` after a docstring or a list of classes has changed; a test compares the committed page with this one.
Formulas come from the docstrings and sizes from packets that are encoded here. The table `ENTRIES` of
`notation_entries.py` adds the source and the use of each name.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import raysim_contrib
import torch
from notation_entries import ENTRIES, INTRODUCTION, SECTIONS

from raysim.codecs import CODECS, Codec
from raysim.compressors import COMPRESSORS, parse
from raysim.notation import Notation
from raysim.replication import METHODS, parse_replica_method
from raysim.replication.method import ReplicaContext, average_together
from raysim.schedules import SCHEDULES, parse_schedule
from raysim.weights import POLICIES, parse_weights

PAGE = Path(__file__).with_name("notation.md")

PLUG_IN = "In the plug-in `raysim-contrib`: `pip install raysim-contrib`, or in a clone `pip install ./contrib`."

VARYING = {"GraVAC", "MARINA"}  # replica methods whose bytes depend on the gradients of the run

CLASSES: dict[str, dict[str, type[Notation]]] = {
    "codec": CODECS | {name: getattr(raysim_contrib, name) for name in raysim_contrib.__all__},
    "compressor": dict(COMPRESSORS),
    "replica method": dict(METHODS),
    "schedule": dict(SCHEDULES),
    "weight policy": dict(POLICIES),
}


READERS: dict[str, Callable[[str], object]] = {
    "codec": parse,
    "compressor": parse,
    "replica method": parse_replica_method,
    "schedule": parse_schedule,
    "weight policy": parse_weights,
}


def packet_factors(codec: Codec) -> tuple[str, str]:
    """Return dense over packet bytes for activations and for gradients."""
    gradient = torch.randn(8, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    if type(codec) is CODECS["Mean"]:
        return "-", "-"  # it is a codec of one value, for the values of others
    packets = [codec.encode(x, key=1) for x in (gradient.relu(), gradient)]
    activation, gradient_factor = (f"{one.dense_bytes / one.array_bytes:.1f}x" for one in packets)
    return activation, gradient_factor


def replica_factor(example: str) -> str:
    """Return the bytes of an all-reduce divided by a replica's bytes in its eighth step, or in a mean step of its first period."""
    method = parse_replica_method(example)
    shape, period = (512, 512), method.period
    steps = range(8) if period == 1 else [step for step in range(period) if method.part(step) is not None]
    random = torch.Generator().manual_seed(1)
    common = torch.randn(shape, generator=random)
    memories = [method.begin({"weight": torch.zeros(shape)}) for _ in range(2)]
    sent = []
    for step in steps:
        given = [{"weight": common + torch.randn(shape, generator=random)} for _ in range(2)]
        contexts = [
            ReplicaContext(replica, 2, step, 0, len(steps), 1, momentum=0.9, step_s=0.1, parameters=given[replica])
            for replica in range(2)
        ]
        results, sizes = average_together(method, given, memories, contexts)
        memories = [result.memory for result in results]
        sent.append(sizes[0])
    mean = sent[-1] if period == 1 else sum(sent) / period
    return f"{4 * common.numel() / mean:.1f}x"


def signature(cls: type[Notation]) -> str:
    """Return a class as one would call it, with its defaults."""
    arguments = [
        one.name if one.default is inspect.Parameter.empty else f"{one.name}={one.default!r}"
        for one in inspect.signature(cls).parameters.values()
    ]
    return f"{cls.name()}({', '.join(arguments)})"


def prose(cls: type[Notation]) -> str:
    """Return a class's docstring, without its doctest, as Markdown."""
    first, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n")
    text = re.split(r"^>>> ", f"{first}\n{textwrap.dedent(rest)}", maxsplit=1, flags=re.MULTILINE)[0]
    text = re.sub(r'\n("\w+") {2,}', r"\n\n- \1: ", text)  # a list of choices
    text = re.sub(r"^Args:\n", "Arguments:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"^ {8}", "  ", text, flags=re.MULTILINE)
    text = re.sub(r"^Args:$", "Arguments:\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    parts = re.split(r"(`[^`]*`)", text.strip())
    return "".join(part if part.startswith("`") else re.sub(r"([*_<|\[])", r"\\\1", part) for part in parts)


def table(kind: str) -> list[str]:
    """Return the rows of a kind's summary."""
    sizes = {"codec": ["activations", "gradients"], "replica method": ["factor"]}.get(kind, [])
    lines = [" | ".join(["| example", *sizes, "when to use it |"]), "|---" * (len(sizes) + 2) + "|"]
    for name, entry in ENTRIES[kind].items():
        figures: tuple[str, ...] = ()
        if kind == "codec":
            figures = packet_factors(parse(entry.example).codec)
        elif kind == "replica method":
            figures = ("varies" if name in VARYING else replica_factor(entry.example),)
        lines.append(" | ".join([f"| [`{entry.example}`](#{anchor(kind, name)})", *figures, f"{entry.use} |"]))
    return lines


def anchor(kind: str, name: str) -> str:
    """Return the anchor of a name's heading, which tells a link's method from a replica method of the same name."""
    return heading(kind, name).lower().replace(" ", "-")


def heading(kind: str, name: str) -> str:
    """Return the heading of a name; names that stand for two methods say which one it is."""
    twice = sum(name in names for names in ENTRIES.values()) > 1
    return f"{name} as a {kind}" if twice else name


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for kind, (title, introduction) in SECTIONS.items():
        if (missing := set(CLASSES[kind]) ^ set(ENTRIES[kind])) != set():
            raise SystemExit(
                f"docs/generate_notation.py needs one entry a {kind}; too many or missing: {sorted(missing)}."
            )
        lines += [f"## {title}\n", f"{introduction}\n", *table(kind), ""]
        for name, entry in ENTRIES[kind].items():
            cls = CLASSES[kind][name]
            lines += [f"### {heading(kind, name)}\n", f"`{signature(cls)}`\n", f"{prose(cls)}\n"]
            if entry.source:
                lines.append(f"Source: {entry.source}.\n")
            if cls.__module__.startswith("raysim_contrib."):
                lines.append(f"{PLUG_IN}\n")
    return "\n".join(lines)


def check_examples() -> None:
    """Parse every example, so that none is written in a notation that is refused."""
    for kind, entries in ENTRIES.items():
        read = READERS[kind]
        for name, entry in entries.items():
            if name != "Custom":  # it reads a file
                read(entry.example)


if __name__ == "__main__":
    check_examples()
    text = page()
    if "--check" in sys.argv:
        if text != PAGE.read_text(encoding="utf-8"):
            raise SystemExit("docs/notation.md is not what the classes say: run `make notation`.")
    else:
        PAGE.write_text(text, encoding="utf-8")
