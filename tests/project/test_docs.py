"""README and the pages in docs: their links lead somewhere, and their code blocks run as typed.

A page is run from top to bottom in a folder of its own, in which `examples` and `docs` are as in the checkout. Blocks of `sh`
go to bash and blocks of `python` to one interpreter; a block with a title, as in ```toml title="mine.toml", is written to that file.
The comment `<!-- not run: REASON -->` on the line before a block exempts it. Blocks of `text` show output, which differs from machine
to machine, and are not compared.
"""

import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import generate_notation
import pytest
from typer.testing import CliRunner

import raysim
import raysim.nn
from raysim import analysis, testing
from raysim.cli import app
from raysim.config import as_row, read_config
from raysim.records import SCHEMAS
from raysim.sweeps.race_rounds import COLUMNS as RACE
from raysim.sweeps.trial_rows import COLUMNS
from raysim.training.rows import first_row

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "findings/README.md")
        if (ROOT / name).exists()
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"^ *```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    title: str | None
    code: str
    reason: str | None

    @property
    def script(self) -> str:
        """Return Python that runs the block."""
        if self.title:
            return f"Path({self.title!r}).write_text({self.code!r})"
        if self.language == "sh":
            return f"subprocess.run(['bash', '-euc', {self.code!r}], check=True)"
        return self.code


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(one["language"], one["title"], one["code"], one["reason"]) for one in found]


def runnable(page: Path) -> list[Block]:
    return [one for one in blocks(page) if not one.reason and (one.title or one.language in ("sh", "python"))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES if runnable(page)])
def test_code_blocks_run(page, tmp_path):
    script = "import subprocess\nfrom pathlib import Path\n" + "\n".join(one.script for one in runnable(page))
    for folder in ("examples", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
    }
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_code_blocks_have_a_known_language_or_a_reason():
    """A block of a language that is not run and has no reason would escape the tests."""
    known = {"sh", "python", "text"}
    found = ((page, one) for page in PAGES for one in blocks(page))
    assert [both for both in found if both[1].language not in known and not both[1].title and not both[1].reason] == []


def test_links_lead_to_files_and_headings():
    assert {name(page): links for page in PAGES if (links := broken_links(page))} == {}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}")
    return broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md"])
def test_shared_pages_are_symlinks_to_root_files(name):
    """An editor that writes a file in place of the link would leave two versions."""
    assert (ROOT / "docs" / name.lower()).resolve() == (ROOT / name).resolve()


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents]
    assert [page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", navigation, re.MULTILINE)] == []


def test_the_api_pages_have_every_public_name():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    assert {identifier for identifier in listed if pydoc.locate(identifier) is None} == set()
    public = {
        f"{module.__name__}.{name}" for module in (raysim, raysim.nn, analysis, testing) for name in module.__all__
    }
    modules = {name for name in public if isinstance(pydoc.locate(name), ModuleType)}
    assert public - modules - listed == set()


def test_no_page_is_longer_than_400_lines():
    lengths = {name(page): page.read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert {page: lines for page, lines in lengths.items() if lines > 400} == {}
    assert lengths["README.md"] <= 110


def test_the_manual_has_at_most_60000_words():
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in PAGES}
    del texts[ROOT / "CHANGELOG.md"]
    assert sum(len(text.split()) for text in texts.values()) <= 60_000


@pytest.mark.slow  # CI builds it in a job of its own
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


def test_records_page_lists_every_column():
    text = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    found = {}
    for section in text.split("\n## ")[1:]:
        title, _, table = section.partition("\n")
        cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        found[title] = {column for cell in cells for column in re.findall(r"`([^`]+)`", cell)}
    config = read_config("digits-cnn")
    written = {name: set(schema.names) for name, schema in SCHEMAS.items()}
    written |= {
        "run": set(first_row(config, "id")) - set(as_row(config)),
        "trials": set(COLUMNS.names),
        "race": set(RACE.names),
    }
    del found["JSON of commands"]
    assert found.keys() == written.keys()
    for name, columns in written.items():
        assert columns - found[name] == set(), name
    for name, schema in SCHEMAS.items():
        assert found[name] == set(schema.names), name


def test_overlap_table_matches_its_commands(tmp_path, monkeypatch):
    """Every step on the page of networks is that of the commands above its table, run on the file above them."""
    page = ROOT / "docs" / "networks.md"
    files = [block for block in blocks(page) if block.title in ("overlap.toml", "costs.toml")]
    commands, priced = [block.code for block in blocks(page) if block.language == "sh" and "overlap.toml" in block.code]
    monkeypatch.chdir(tmp_path)
    for each in files:
        Path(each.title).write_text(each.code)
    printed = []
    for line in commands.splitlines():
        done = CliRunner().invoke(app, line.split()[1:])
        assert done.exit_code == 0, done.output
        printed.append(re.findall(r"^A step takes (.+) on (\w+)\.$", done.output, re.MULTILINE))
    table = page.read_text(encoding="utf-8").partition(commands)[2].partition("|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    by_column = [[(cells[i], cells[0].strip("`")) for cells in rows] for i in (1, 2)]
    assert by_column == printed
    done = CliRunner().invoke(app, priced.split()[1:])
    money = page.read_text(encoding="utf-8").partition(priced)[2].partition("|---|\n")[2].partition("\n\n")[0]
    for line in money.splitlines():
        network, _, *cells = (cell.strip(" `") for cell in line.strip("|").split(" | "))
        assert re.search(rf"│ {network} +│ +{' +│ +'.join(map(re.escape, cells))} ", done.output), done.output


def test_notation_pages_match_classes():
    generate_notation.check_entries()
    for path, text in generate_notation.texts().items():
        assert path.read_text(encoding="utf-8") == text, f"run `make notation`: {path} differs from the classes"


def test_the_map_for_language_models_matches_pages():
    command = [sys.executable, "docs/generate_llms.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_evidence_matches_findings():
    """Harm, bounds and verdict of each row are those of the setting's row on its page, rounded."""
    rows = [
        line.split(" | ")
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if "%" in line or "points (" in line
    ]
    page, seen = "", 0
    for cells in (cells for cells in rows if len(cells) == 5):
        link = re.search(r"\((docs/findings/[\w-]+\.md)\)", cells[0])
        page = (ROOT / link[1]).read_text(encoding="utf-8") if link else page
        (found,) = [line for line in page.splitlines() if re.match(rf"\| {re.escape(cells[1])} \| ", line)]
        effect, bounds, verdict = found.strip("| ").split(" | ")[-3:]
        expected = [float(number) for number in (effect, *bounds.split(" to "))]
        if cells[3].startswith("accuracy"):  # lower is worse
            expected = [-expected[0], -expected[2], -expected[1]]
        numbers = re.findall(r"[+-][\d.]+", cells[3])
        for number, value in zip(numbers, expected, strict=True):
            assert abs(float(number) - value) <= 0.51 * 10 ** -len(number.partition(".")[2]), (cells[1], number, value)
        assert verdict.startswith(cells[4].strip("| "))
        seen += 1
    assert seen == 9
