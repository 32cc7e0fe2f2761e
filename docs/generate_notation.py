"""Write docs/notation: every codec, compressor, replica method, schedule and weight policy, from the classes themselves.

Run `make notation` after a docstring or a list of classes has changed; a test compares the committed pages with these.
Formulas and sources come from the docstrings, and sizes from packets encoded here. The table `ENTRIES` of `notation_entries.py` adds
an example and the use of each name.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
from notation_entries import ENTRIES, INTRODUCTION, PAGES, Entry

from raysim.codecs import CODECS, Codec
from raysim.compressors import COMPRESSORS, Compressor, parse
from raysim.notation import Notation
from raysim.pipeline.groups import average_together
from raysim.plugins import contrib, import_object
from raysim.replication import METHODS, parse_replica_method
from raysim.replication.method import ReplicaContext, ReplicaMethod
from raysim.schedules import SCHEDULES, parse_schedule
from raysim.schedules.weights import POLICIES, WeightPolicy, parse_weights

FOLDER = Path(__file__).with_name("notation")

VARYING = {"EDGC", "GraVAC", "MARINA"}  # replica methods whose bytes depend on the gradients of the run


def plug_ins(base: type[Notation]) -> dict[str, type[Notation]]:
    """Return the classes of the plug-in raysim-contrib that derive from `base`."""
    classes = {name: import_object(path) for name, path in contrib().items()}
    return {name: cls for name, cls in classes.items() if issubclass(cls, base)}


CLASSES: dict[str, dict[str, type[Notation]]] = {
    "codec": CODECS | plug_ins(Codec),
    "compressor": COMPRESSORS | plug_ins(Compressor),
    "replica method": METHODS | plug_ins(ReplicaMethod),
    "schedule": dict(SCHEDULES),
    "weight policy": POLICIES | plug_ins(WeightPolicy),
}


def with_plug_ins() -> dict[str, dict[str, Entry]]:
    """Return `ENTRIES` with those of the plug-in's classes: their first variant, and the paragraph `Use` of the docstring."""
    made = {kind: dict(known) for kind, known in ENTRIES.items()}
    for kind, classes in CLASSES.items():
        for name, cls in classes.items():
            if cls.variants and name not in made[kind]:
                made[kind][name] = Entry(cls.variants[0], USE.findall(inspect.cleandoc(cls.__doc__ or ""))[0])
    return made


USE = re.compile(r"^Use: (.*)\n?", re.MULTILINE)
TABLE = with_plug_ins()


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
    packets = [codec.encode(x, key=3) for x in (gradient.relu(), gradient)]
    activation, gradient_factor = (f"{packet.dense_bytes / packet.array_bytes:.1f}x" for packet in packets)
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
        parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(cls).parameters.values()
    ]
    return f"{cls.name()}({', '.join(arguments)})"


def prose(cls: type[Notation]) -> str:
    """Return a class's docstring, without its doctest, as Markdown; of the plug-in's classes, the first paragraph."""
    first, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n")
    if is_plug_in(cls):
        first, rest = re.sub(r":+$", ".", f"{first}\n{rest}".partition("\n\n")[0]), ""
    text = USE.split(re.split(r"^>>> ", f"{first}\n{textwrap.dedent(rest)}", maxsplit=1, flags=re.MULTILINE)[0])[0]
    text = re.sub(r'\n("\w+") {2,}', r"\n\n- \1: ", text)  # a list of choices
    text = re.sub(r"^Args:\n", "Arguments:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"^ {8}", "  ", text, flags=re.MULTILINE)
    parts = re.split(r"(`[^`]*`)", text.strip())
    text = "".join(part if part.startswith("`") else re.sub(r"([*_<|\[])", r"\\\1", part) for part in parts)
    return re.sub(r"\b\d{4}\.\d{5}\b", r"[arXiv:\g<0>](https://arxiv.org/abs/\g<0>)", text)


def names_of(page: str) -> list[str]:
    """Return the names on a page, in the order of `TABLE`."""
    kind = PAGES[page].kind
    return [name for name in TABLE[kind] if is_plug_in(CLASSES[kind][name]) == page.startswith("rare-")]


def is_plug_in(cls: type[Notation]) -> bool:
    """Return whether a class is of the plug-in raysim-contrib."""
    return cls.__module__.startswith("raysim_contrib.")


def table(page: str) -> list[str]:
    """Return the rows of a page's summary."""
    kind = PAGES[page].kind
    sizes = {"codec": ["activations", "gradients"], "replica method": ["factor"]}.get(kind, [])
    lines = ["| " + " | ".join(["example", *sizes, "use"]) + " |", "|---" * (len(sizes) + 2) + "|"]
    for name in names_of(page):
        entry = TABLE[kind][name]
        figures: tuple[str, ...] = ()
        if kind == "codec":
            figures = packet_factors(parse(entry.example).codec)
        elif kind == "replica method":
            figures = ("varies" if name in VARYING else replica_factor(entry.example),)
        lines.append(" | ".join([f"| [`{entry.example}`](#{anchor(kind, name)})", *figures, f"{entry.use} |"]))
    return lines


def anchor(kind: str, name: str) -> str:
    """Return the anchor of a name's heading."""
    return heading(kind, name).lower().replace(" ", "-")


def heading(kind: str, name: str) -> str:
    """Return the heading of a name; a name of two methods, such as `EF21`, is followed by its kind."""
    twice = sum(name in names for names in TABLE.values()) > 1
    return f"{name} as a {kind}" if twice else name


def text_of(page: str) -> str:
    """Return a page."""
    kind, title, keys, introduction = PAGES[page]
    lines = [f"# {title}\n", f"{introduction}\n\nKeys: {keys}.\n", *table(page), ""]
    for name in names_of(page):
        cls = CLASSES[kind][name]
        module = f" in `{cls.__module__}`" if is_plug_in(cls) else ""
        lines += [f"## {heading(kind, name)}\n", f"`{signature(cls)}`{module}\n", f"{prose(cls)}\n"]
    return "\n".join(lines)


def index() -> str:
    """Return the first page, which links to every name."""
    lines = [INTRODUCTION, "| page | keys | names |", "|---|---|---|"]
    for page, (kind, title, keys, _) in PAGES.items():
        names = ", ".join(f"[{name}]({page}.md#{anchor(kind, name)})" for name in names_of(page))
        lines.append(f"| [{title}]({page}.md) | {keys} | {names} |")
    return "\n".join([*lines, ""])


def texts() -> dict[Path, str]:
    """Return the text of every page by its path."""
    return {FOLDER / "index.md": index()} | {FOLDER / f"{page}.md": text_of(page) for page in PAGES}


def check_entries() -> None:
    """Raise SystemExit unless every class has one entry, and every example is read."""
    for kind, entries in TABLE.items():
        if differ := sorted(set(CLASSES[kind]) ^ set(entries)):
            raise SystemExit(
                f"docs/notation_entries.py needs one entry for each {kind}; too many or missing: {differ}."
            )
        for name, entry in entries.items():
            if name != "Custom":  # it reads a file
                READERS[kind](entry.example)


if __name__ == "__main__":
    check_entries()
    pages = texts()
    if "--check" in sys.argv:
        for path, text in pages.items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                raise SystemExit(f"docs/notation/{path.name} differs from the classes: run `make notation`.")
    else:
        FOLDER.mkdir(exist_ok=True)
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
