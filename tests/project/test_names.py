"""Names: the core knows no single method, and a citation names a paper that a reader can find."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from raysim.codecs import CODECS
from raysim.compressors import COMPRESSORS
from raysim.replication import METHODS
from raysim.schedules.weights import POLICIES

ROOT = Path(__file__).parents[2]
ROOMS_OF_METHODS = ("raysim/codecs", "raysim/compressors", "raysim/replication", "raysim/schedules/weights")
# Methods may be named here: they are built of other methods in their own rooms.
EXEMPT = ROOMS_OF_METHODS
# What every method is built on, in the rooms of methods.
FOUNDATIONS = (
    "raysim/codecs/codec.py",
    "raysim/codecs/groups.py",
    "raysim/codecs/message.py",
    "raysim/codecs/positions.py",
    "raysim/codecs/kernels/__init__.py",
    "raysim/compressors/compressor.py",
    "raysim/replication/controller.py",
    "raysim/replication/method.py",
    "raysim/replication/layers.py",
)
METHOD_CLASSES = {cls.__name__ for known in (CODECS, COMPRESSORS, METHODS, POLICIES) for cls in known.values()} | {
    "Dense"
}
ALLOWED = {
    "Identity",  # no compression: tied parameters, control numbers and uncompressed baselines are sent by it
    "Plain",  # a codec without memory, defined in a foundation
}
ALLOWED_IN = {
    "raysim/distributed/fsdp.py": {"Gathered"}
}  # FSDP's one reduce-scatter fits methods that gather, and no other
CITATION = re.compile(r"\boracles?\b (?:section |L)?\d|\b[a-z_]+\.md,? \d")


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    found = [ROOT / line for line in listed.splitlines()]
    return found or [path for pattern in patterns for path in ROOT.glob(f"raysim/**/{pattern}")]


def core() -> list[str]:
    names = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "raysim").rglob("*.py"))]
    return [name for name in names if not name.startswith(EXEMPT)] + list(FOUNDATIONS)


def test_core_names_no_single_method() -> None:
    """Capabilities and hooks of a method's class stand in for its name."""
    named = {name: methods_named(name) - ALLOWED - ALLOWED_IN.get(name, set()) for name in core()}
    assert {name: methods for name, methods in named.items() if methods} == {}


def methods_named(name: str) -> set[str]:
    text = (ROOT / name).read_text()
    if not METHOD_CLASSES.intersection(re.findall(r"\w+", text)):
        return set()
    tree = ast.parse(text)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            tuple(room.replace("/", ".") for room in ROOMS_OF_METHODS)
        ):
            used |= {alias.name for alias in node.names}
    return used & METHOD_CLASSES


def test_citations_have_paper_names() -> None:
    for path in files("*.py", "*.md", "*.toml"):
        if path.exists() and path != Path(__file__):
            found = CITATION.search(path.read_text())
            assert not found, f"{path}: {found.group() if found else ''}"


def test_the_glossary_has_every_term_once_in_one_sentence() -> None:
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()[6:]]
    terms = [term for term, _ in rows]
    assert terms == sorted(set(terms), key=lambda term: term.replace("-", "").lower())
    for _, meaning in rows:
        assert meaning.endswith(".")
        assert ". " not in meaning


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    for path in [path for room in ("raysim", "analysis", "sweeps") for path in sorted((ROOT / room).rglob("*.py"))]:
        found = re.search(r'(?:\A|:\n) *"""(What|Who|How|Whether|Why|Where|Which|When|All)\s', path.read_text())
        assert not found, f"{path}: {found.group() if found else ''}"
