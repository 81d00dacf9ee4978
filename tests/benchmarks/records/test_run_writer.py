"""Damaged run folders: one line each, before anything in them is changed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.records import write_json
from benchmarks.records.run_folder import RunFolderError
from benchmarks.records.run_writer import RunWriter
from benchmarks.settings import parse

MAIN: Any = SimpleNamespace(is_main_process=True, num_processes=1)
ABOUT = {
    "data": {
        **{"name": "glyphs", "split": "test", "fingerprint": "abc"},
        **{"test_classes": 3, "test_images": 9},
    },
    "weights": None,
}


def opened(folder: Path, *options: str) -> RunWriter:
    command = parse(["--recipe=glyphs/demo/binomial", f"--output={folder}", *options])
    return RunWriter(command, [], MAIN, ABOUT)


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that was stopped after two rows of each table."""
    run = opened(tmp_path / "run")
    run.begin(None)
    for table in ("training", "evaluation"):
        run.log({table: [(1, {"loss": 1.0}), (2, {"loss": 0.5})]})
    run.update(status="stopped")
    run.close()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "finished", "metrics": {}}, "its metrics is damaged; run that training again"),
        ({"data": {"name": "glyphs", "split": "test"}}, "its data.fingerprint is"),
    ],
)
def test_damage_is_one_line_and_changes_nothing(
    begun: Path, changes: dict[str, Any], words: str
) -> None:
    record = json.loads((begun / "run.json").read_text())
    write_json(begun / "run.json", record | changes)
    before = contents(begun)
    with pytest.raises(RunFolderError) as refused:
        opened(begun, "--resume").begin(None)
    line = str(refused.value)
    assert words in line
    assert str(begun) in line
    assert "\n" not in line
    assert contents(begun) == before
    assert not list(begun.rglob("*.tmp"))


def test_a_run_says_that_it_runs_once_nothing_can_refuse_it(begun: Path) -> None:
    def said() -> tuple[str, int]:
        record = json.loads((begun / "run.json").read_text())
        return record["status"], len(record["sessions"])

    run = opened(begun, "--resume")
    assert said() == ("stopped", 1)
    run.begin(None)
    assert said() == ("running", 2)
    run.close()
