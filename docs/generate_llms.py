"""Write docs/llms.txt, a map of the docs for language models (llmstxt.org): every page of the navigation with its first sentence.

Run `make llms` after a page, its title or its first paragraph has changed; a test compares the committed file with this one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
FILE = DOCS / "llms.txt"


def entries(nav: list[Any], names: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield each page of the navigation: the sections that it is in, and its path."""
    for item in nav:
        if isinstance(item, str):
            yield " / ".join(names), item
            continue
        ((name, inner),) = item.items()
        if isinstance(inner, str):
            yield " / ".join(names), inner
        else:
            yield from entries(inner, (*names, name))


def summary(path: str) -> str:
    """Return the line of a page: its title, its path, and the first sentence of its first paragraph, if it has one."""
    title, *blocks = (
        re.sub(r"```.*?```", "", (DOCS / path).read_text(encoding="utf-8"), flags=re.DOTALL).strip().split("\n\n")
    )
    prose = next((" ".join(block.split()) for block in blocks if re.match(r"[\w`\[*]", block)), "")
    sentence = re.split(r"(?<=[.:?])\s(?=[A-Z`*])", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose))[0].rstrip(":")
    return f"- [{title.removeprefix('# ')}]({path})" + (f": {sentence}" if sentence else "")


def text() -> str:
    """Return the whole file."""
    config = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    lines, last = [f"# {config['site_name']}", "", f"> {config['site_description']}"], None
    for section, path in entries(config["nav"]):
        if section != last:
            lines += ["", f"## {section or 'Start here'}", ""]
            last = section
        lines.append(summary(path))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            "docs/llms.txt is not that of the pages: run `make llms`."
            if FILE.read_text(encoding="utf-8") != text()
            else 0
        )
    FILE.write_text(text(), encoding="utf-8")
