"""The commands and commits that measured numbers of README, CONTRIBUTING and docs/ are from are there.

A section with measured numbers has the line

    Measured at `COMMIT` by `COMMAND`.

Words may follow "Measured" and the commits; further commits and commands stand beside the first, each in backticks.
A bound that a test asserts stands in a paragraph that names the test's file, such as `tests/library/test_horde.py`.
"""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.settings import read_table, table_names
from benchmarks.speed.cases import CASES
from tests.support.processes import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = r"`[^`]+`(?:(?:,| and|, and) `[^`]+`)*"
MEASURED = re.compile(rf"\bMeasured[\w ,-]* at ({NAMES})[\w ,-]* by ({NAMES})")
TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")


def sources(page: Path) -> list[tuple[str, str]]:
    """Commits and commands of a page, as they are quoted there."""
    return MEASURED.findall(page.read_text().replace("\n", " "))


def quoted(names: str) -> list[str]:
    return re.findall(r"`([^`]+)`", names)


def missing(command: str) -> str | None:
    """The first name in a command that does not exist."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["make", target]:
            there = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", module, *_] if importlib.util.find_spec(module.split(".")[0]):
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{module}.__main__")
            there = spec
        case ["python", file, *_]:
            there = (ROOT / file).is_file()
        case _:
            there = None
    if not there:
        return command
    if "benchmarks.speed" in words:
        cases = [word for word in words[3:] if re.fullmatch(r"[a-z_]+", word)]
        return next((case for case in cases if case not in CASES), None)
    named = [word for word, before in zip(words[1:], words, strict=False) if before == "--recipe"]
    files = [word.split("::")[0] for word in words if word.startswith(("tests/", "tools/"))]
    recipes = {entry.name for table in table_names() for entry in read_table(table).entries}
    return next(
        (name for name in named if name not in recipes),
        next((name for name in files if not (ROOT / name).exists()), None),
    )


def test_what_the_sources_name_is_there() -> None:
    commands = {name for page in PAGES for _, names in sources(page) for name in quoted(names)}
    assert len(commands) >= 3
    assert [name for name in commands if missing(name)] == []
    tests = {name for page in PAGES for name in TEST_FILE.findall(page.read_text())}
    assert len(tests) >= 3
    assert [name for name in tests if not (ROOT / name).is_file()] == []


def test_the_commits_are_in_the_history() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )

    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if not (ROOT / ".git").exists() or shallow != "false":
        pytest.skip("no history here, or only its end")
    commits = {name for page in PAGES for names, _ in sources(page) for name in quoted(names)}
    assert commits
    lost = [name for name in commits if git("merge-base", "--is-ancestor", name, "HEAD").returncode]
    assert lost == []
