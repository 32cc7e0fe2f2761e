"""Write the tables of docs/findings, and the evidence of `raysim advise`, from the runs in docs/findings/data.

Run `make findings` after `keep_findings.py` has kept a study; a test compares the committed pages with this program's.

In a page, the lines between `<!-- NAME -->` and `<!-- end -->` are written here: `runs`, `settings`, `verdicts`; `networks` of a
study that asks for the time to a target; and in the index `claims` and `coverage`. All other lines are written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from findings_evidence import evidence
from findings_index import claims_table, coverage_sentence
from findings_laws import laws
from findings_tables import blocks_of
from raysim_findings.finding import Finding
from raysim_findings.verdicts import findings

from raysim.analysis import Results, load

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "findings"
DATA = PAGES / "data"
EVIDENCE = ROOT / "raysim" / "forecast" / "evidence.json"
LAWS = ROOT / "raysim" / "forecast" / "laws.json"


def decided(results: Results) -> list[Finding]:
    """Return the findings supported by runs of these results."""
    return [finding for finding in findings(results) if finding.tested]


def filled(text: str, blocks: dict[str, str]) -> str:
    """Return a page with its blocks replaced; raises SystemExit if it lacks one."""
    for name, block in blocks.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}",  # type: ignore[misc]
            text,
            flags=re.S,
        )
        if count != 1:
            raise SystemExit(f"A page of findings must have one block `<!-- {name} -->`, but got {count}.")
    return text


def pages() -> dict[str, Results]:
    """Return the kept studies by the names of their pages."""
    return {folder.name: load(folder) for folder in sorted(DATA.iterdir()) if folder.is_dir()}


def written(studies: dict[str, Results]) -> dict[Path, str]:
    """Return the text of every page."""
    verdicts = {name: decided(results) for name, results in studies.items()}
    blocks = {name: blocks_of(results, verdicts[name]) for name, results in studies.items()}
    blocks["index"] = {"claims": claims_table(verdicts), "coverage": coverage_sentence(studies)}
    texts = {
        page: filled(page.read_text(encoding="utf-8"), tables)
        for name, tables in blocks.items()
        for page in [PAGES / f"{name}.md"]
    }
    return texts | {EVIDENCE: evidence(studies), LAWS: laws()}


if __name__ == "__main__":
    for page, text in written(pages()).items():
        page.write_text(text, encoding="utf-8")
