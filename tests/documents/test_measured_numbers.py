"""Every measured result of README, CONTRIBUTING and docs/ has a source: a command and a commit.

Results are numbers with an interval (±), and decimals alone in a cell of a table. A row of docs/provenance.md
links to their section, to one around it or to the whole page, with commands in its second column and commits in its
third, each in backticks. Generated pages, such as those of studies, have the line

    Measured at `COMMIT` by `COMMAND`.

A table of other numbers (a paper's, settings) begins with

    <!-- not measured: SOURCE -->
"""

import re
import subprocess
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.settings.recipe_files import recipe_names
from speed.cases import CASES
from tests.support.processes import ROOT

PROVENANCE = ROOT / "docs" / "provenance.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NUMBER = re.compile(r"± ?\d|^\|(?:.*\|)? *[-+*~]*\d[\d,]*\.\d[\d.,:/ *-]*\|", re.MULTILINE)
MARK = re.compile(r"<!-- not measured: [^>]+ -->")

NAMES = r"`[^`]+`(?:(?:,| and|, and) `[^`]+`)*"
MEASURED = re.compile(rf"\bMeasured[\w ,-]* at ({NAMES})[\w ,-]* by ({NAMES})")
SOURCES = re.compile(r"^\| [^|]*\]\([^|]* \| ([^|]*`[^|]*) \| ([^|]*`[0-9a-f]{7,40}`[^|]*) \|$")
TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")


def sections(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paragraphs and tables, without code, each below the headings that it stands under."""
    headings: list[tuple[int, str]] = []
    for block in re.split(r"```.*?^```$|\n{2,}", text, flags=re.DOTALL | re.MULTILINE):
        block = block.strip("\n")
        if heading := re.match(r"(#+) (.+)", block):
            level = len(heading[1])
            headings = [(k, name) for k, name in headings if k < level] + [(level, heading[2])]
            block = block[heading.end() :]
        yield tuple(name for _, name in headings), block


def linked(provenance: str, page: str) -> set[str]:
    """The anchors of a page that rows of the table of sources link to; "" stands for the whole page."""
    rows = [line for line in provenance.splitlines() if SOURCES.match(line)]
    links = re.findall(r"\]\((?:\.\./)?([\w/]+\.md)(?:#([\w-]+))?\)", "\n".join(rows))
    return {anchor for target, anchor in links if target == page}


def anchor(heading: str) -> str:
    """As GitHub and Python-Markdown make them of plain words."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def without_source(text: str, anchors: Collection[str] = ()) -> list[str]:
    """The paragraphs and tables of a page with a measured number that has no source."""
    found = list(sections(text))
    sourced = {where for where, block in found if MEASURED.search(block.replace("\n", " "))}
    return [
        block
        for where, block in found
        if not {"", *map(anchor, where)} & {*anchors}
        and not any(where[:k] in sourced for k in range(len(where) + 1))
        and not MARK.match(block)
        and NUMBER.search(re.sub(r"`[^`]*`", "`", block))
    ]


def sources(pattern: str) -> set[str]:
    """What stands in backquotes beside all measured numbers, and looks like the pattern."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        named = MEASURED.findall(text.replace("\n", " "))
        named += [row.groups() for line in text.splitlines() if (row := SOURCES.match(line))]
        found |= {name for pair in named for part in pair for name in re.findall(pattern, part)}
    return found


def exists(command: str) -> bool:
    """Whether there is the target, module or file that a command names."""
    match re.sub(r"^[A-Z_]+=\S+ ", "", command).split():
        case ["make", target]:
            return f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["python", "-m", module, *_]:
            return bool(find_spec(module.split(".")[0]) and find_spec(module))
        case ["python", file, *_]:
            return (ROOT / file).is_file()
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_numbers_have_a_source(page: Path) -> None:
    anchors = linked(PROVENANCE.read_text(), page.name)
    assert without_source(page.read_text(), anchors) == []


def test_the_table_of_sources_links_to_sections_that_exist() -> None:
    rows = [line for line in PROVENANCE.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) > 5 and all(SOURCES.match(row) for row in rows)
    for page in PAGES:
        headings = {anchor(name) for where, _ in sections(page.read_text()) for name in where}
        assert linked(PROVENANCE.read_text(), page.name) <= headings | {""}, page.name


def test_what_the_sources_name_is_there() -> None:
    commands = sources(r"`((?:[A-Z_]+=\d+ )?(?:python|make) [^`]+)`")
    assert len(commands) >= 3
    assert [name for name in commands if not exists(name)] == []
    said = "\n".join(commands)
    assert set(re.findall(r"--recipe (\S+)", said)) <= set(recipe_names())
    assert set(re.findall(r"-m speed (\S+)", said)) <= set(CASES)
    files = {name for page in PAGES for name in TEST_FILE.findall(page.read_text())}
    files |= set(re.findall(r"tests/\S+", said))
    assert len(files) >= 3
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_commits_are_in_the_history() -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout

    shallow = git("rev-parse", "--is-shallow-repository").strip()
    if not (ROOT / ".git").exists() or shallow != "false":
        pytest.skip("no history here, or only its end")
    commits, history = sources(r"`([0-9a-f]{7,40})`"), git("rev-list", "HEAD")
    assert commits
    assert [name for name in commits if f"\n{name}" not in f"\n{history}"] == []


INTERVAL = re.compile(r"(\d+\.\d+)\s(?:±|\+-)\s(\d+\.\d+)")


def test_the_requests_to_pml_have_the_numbers_of_the_pages() -> None:
    pages = INTERVAL.findall("\n".join(page.read_text() for page in PAGES))
    requests = [INTERVAL.findall(path.read_text()) for path in (ROOT / "upstream").glob("*.md")]
    assert sum(map(len, requests)) > 50
    assert set().union(*requests) <= set(pages)
