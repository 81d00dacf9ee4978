"""Bits flipped in the files that `--resume` reads: the run ends as it would have, or one line says why not."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.building.objective import build_optimizer
from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.records.steps import read_table
from benchmarks.run import main
from benchmarks.settings.experiment import Experiment
from benchmarks.training import run
from benchmarks.training.parts import build_parts
from benchmarks.training.state import TrainingState
from tests.benchmarks.runs import forget, mark_unfinished
from tests.support.processes import TINY

SETTINGS = (
    *(*TINY, "--optimization.steps=6", "--checkpoint_every=2", "--evaluation.every=2"),
    *("--evaluation.curve_classes=4", "--protocol=fair", "--report=false"),
)
SPEED = "images_per_second"


def results(folder: Path) -> dict[str, Any]:
    """All that a report reads; no times."""
    record = json.loads((folder / "run.json").read_text())
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
def whole(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run. Network and images, which are not what is attacked, are built once."""
    made: list[Any] = []
    build = build_parts

    def parts(experiment: Experiment, accelerator: Accelerator) -> Any:
        if not made:
            made.extend(build(experiment, accelerator))
        state, datasets, sampler = made
        model, loss = deepcopy((state.model, state.loss))
        optimizer = build_optimizer(experiment.optimization, model, loss)
        return TrainingState(model, loss, *optimizer), datasets, deepcopy(sampler)

    monkeypatch.setattr(run, "build_parts", parts)
    assert main([data, *SETTINGS, f"--output={tmp_path / 'whole'}"]) == 0
    return tmp_path / "whole"


@given(drawn=st.data(), last=st.booleans())
def test_a_flipped_bit_moves_no_result(
    whole: Path, data: str, capsys: pytest.CaptureFixture[str], drawn: st.DataObject, last: bool
) -> None:
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
