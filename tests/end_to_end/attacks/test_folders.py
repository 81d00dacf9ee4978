"""Files of a run folder with bits flipped, cut off, swapped or emptied, and records with other values."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.records import write_json
from tests.benchmarks.reporting.test_figures import save_features
from tests.benchmarks.reporting.test_report import add_curves_and_images, write_run

VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    10**400,
    1e308,
    float("nan"),
    "",
    "x" * 999,
    "\ud800",
    [],
    [[]],
    {},
    {"": 1},
    True,
)


def flip(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(max(1, 8 * len(content)))
    return bytes(byte ^ (1 << place % 8) * (i == place // 8) for i, byte in enumerate(content))


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def garble(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.randbytes(9) + content[at + 9 :]


def swap_value(draw: random.Random, content: bytes) -> bytes:
    """Of JSON, a value anywhere; anything else is emptied."""
    try:
        record = json.loads(content)
    except ValueError:
        return b""
    place: Any = record
    while True:
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.6):
            break
        place = place[key]
    place[key] = draw.choice(VALUES)
    return json.dumps(record).encode()


DAMAGE: tuple[Callable[[random.Random, bytes], bytes], ...] = (flip, cut, garble, swap_value)


def damages(seed: int, whole: Path, damaged: Path, count: int) -> Iterator[str]:
    """Damage a copy of a folder in one file, again and again; what was done."""
    draw = random.Random(seed)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for _ in range(count):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        file, damage = draw.choice(files), draw.choice(DAMAGE)
        content = (whole / file).read_bytes()
        (damaged / file).write_bytes(damage(draw, content))
        yield f"{damage.__name__} {file}"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = write_run(tmp_path, "base", 0, 0.4)
    add_curves_and_images(folder)
    save_features(folder)
    for events in folder.glob("records/*events*"):
        events.unlink()  # nobody reads them here
    pair = {"class": "a", "taken_for": "b", "count": 1, "queries": 2}
    write_json(folder / "confusion.json", {"pairs": [pair]})
    return folder


@pytest.mark.filterwarnings("ignore")
def test_reports_of_damaged_folders(
    whole: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page, or one line that names the file."""
    damaged, attacks = tmp_path / "damaged", request.config.getoption("--attacks")
    for what in damages(0, whole, damaged, attacks):
        status = report.main([str(damaged)])
        errors = capsys.readouterr().err.splitlines()
        assert status in (0, 2), what
        if status == 2:
            [line] = errors
            assert str(damaged) in line, (what, line)
