"""Nothing in benchmarks/ imports from a room above it, and every room is entered by its door."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FLOORS = (
    *("console", "datasets", "settings", "backbones", "building", "records", "training"),
    *("evaluation", "reporting", "studies"),
)
"""The rooms, from the ground up."""
COMMANDS = ("run", "sweep", "fair", "claims", "report", "tables", "export", "speed")
ROOMS = (*FLOORS, "export", "speed")
FILES = sorted(BENCHMARKS.rglob("*.py"))


def floor(room: str) -> int:
    """The commands stand above all rooms, and above them the measurements of the runner."""
    return {**{name: i for i, name in enumerate(FLOORS)}, "speed": len(FLOORS) + 1}.get(
        room, len(FLOORS)
    )


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and dotted names of what a file imports of benchmarks, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if node.module == "benchmarks" else str(node.module)


def faults(path: Path, root: Path = BENCHMARKS) -> list[str]:
    """Imports of a file that lead upwards, into a circle, or past a door."""
    place = path.relative_to(root).parts
    own = place[0].removesuffix(".py")
    found = []
    for line, name in imports(path):
        if not name.startswith("benchmarks."):
            continue
        room, _, inner = name.removeprefix("benchmarks.").partition(".")
        where = f"{'/'.join(place)}:{line}: {name}"
        if room == own:
            continue
        if floor(room) >= floor(own):
            found.append(f"{where} stands no lower")
        if inner:
            found.append(f"{where} is behind the door of {room}")
    return found


def test_the_rooms_are_those_of_the_plan() -> None:
    rooms = {p.name for p in BENCHMARKS.iterdir() if (p / "__init__.py").exists()}
    files = {p.stem for p in BENCHMARKS.glob("*.py")} - {"__init__"}
    assert rooms == set(ROOMS)
    assert files | {"export", "speed"} == set(COMMANDS)
    assert len(FILES) > 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_nothing_leads_upwards_or_past_a_door(path: Path) -> None:
    assert faults(path) == []


def test_what_is_forbidden_is_found(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "files.py"
    path.write_text(
        "from benchmarks.settings import ConfigError\n"
        "from benchmarks.records.steps import Row\n"
        "from benchmarks import training\n"
        "def late():\n"
        "    from benchmarks.settings.data import Data\n"
        "    import benchmarks.run\n"
    )
    assert faults(path, tmp_path) == [
        "records/files.py:3: benchmarks.training stands no lower",
        "records/files.py:5: benchmarks.settings.data is behind the door of settings",
        "records/files.py:6: benchmarks.run stands no lower",
    ]


@pytest.mark.parametrize("room", FLOORS)
def test_a_door_hands_on_what_is_there(room: str) -> None:
    door = importlib.import_module(f"benchmarks.{room}")
    assert door.__all__
    for name in door.__all__:
        assert getattr(door, name) is not None


LIGHT = {
    "run.py --help": ["benchmarks/run.py", "--help"],
    "run.py --list": ["benchmarks/run.py", "--list"],
    "run.py, misspelt": ["benchmarks/run.py", "--losess=x"],
    "report --help": ["-m", "benchmarks.report", "--help"],
    "tables --help": ["-m", "benchmarks.tables", "--help"],
    "sweep --help": ["-m", "benchmarks.sweep", "--help"],
    "fair --help": ["-m", "benchmarks.fair", "--help"],
    "datasets --help": ["-m", "benchmarks.datasets", "--help"],
    "backbones --help": ["-m", "benchmarks.backbones", "--help"],
}
HEAVY = ("torch", "numpy", "matplotlib", "scipy", "optuna", "timm")


@pytest.mark.parametrize("command", LIGHT)
def test_a_command_starts_light(command: str) -> None:
    """A simple question does not import modules that take seconds."""
    program = [sys.executable, "-X", "importtime", *LIGHT[command]]
    done = subprocess.run(program, cwd=BENCHMARKS.parent, capture_output=True, text=True)
    assert done.returncode == (2 if "misspelt" in command else 0), done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint(HEAVY)
