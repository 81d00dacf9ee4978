"""Bits flipped in the files that `--resume` reads: the run ends as it would have, or one line says why not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.records.steps import read_table
from benchmarks.run import main
from tests.benchmarks.runs import forget, mark_unfinished, record_of
from tests.support.processes import TINY

SETTINGS = (
    *(*TINY, "--optimization.steps=4", "--checkpoint_every=2", "--evaluation.every=2"),
    *("--data.batch_size=20", "--evaluation.curve_classes=4", "--protocol=fair", "--report=false"),
)
SPEED = "images_per_second"


def results(folder: Path) -> dict[str, Any]:
    """All that a report reads; no times."""
    record = record_of(folder)
    kept = ("label", "seed", "steps", "status", "metrics", "outputs", "selection", "data")
    found = {name: record[name] for name in kept}
    for table in ("training", "evaluation"):
        columns = read_table(folder / "records", table)
        found[table] = {name: values for name, values in columns.items() if name != SPEED}
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The files that the runner reads."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", "logs.db") and "tfevents" not in path.name
    }


@pytest.fixture
def whole(data: str, tmp_path: Path) -> Path:
    """A finished run."""
    assert main([data, *SETTINGS, f"--output={tmp_path / 'whole'}"]) == 0
    return tmp_path / "whole"


@given(drawn=st.data(), last=st.booleans())
def test_a_flipped_bit_moves_no_result(whole, data, capsys, drawn, last):
    folder = whole.with_name("run")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    mark_unfinished(folder)
    if not last:
        saved_checkpoints(folder)[-1].unlink()
    name = drawn.draw(st.sampled_from(sorted(contents(folder))))
    content = bytearray((folder / name).read_bytes())
    bit = drawn.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)
    before = contents(folder)
    forget()
    capsys.readouterr()
    status = main([data, *SETTINGS, f"--output={folder}", "--resume"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    if status == 0:
        assert results(folder) == results(whole)
    else:
        assert (status, len(lines)) == (2, 1), lines
        assert str(folder) in lines[0]
        assert contents(folder) == before
