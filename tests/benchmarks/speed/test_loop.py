"""The comparison of the runner with a bare loop: both do the same, and each turn is counted where it belongs."""

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from benchmarks.datasets import Glyphs
from benchmarks.records.steps import read_table
from benchmarks.run import OngoingRun
from benchmarks.settings.command import parse
from benchmarks.speed import loop
from benchmarks.speed.loop import Turns, measure
from benchmarks.training.loop import seed_generators
from benchmarks.training.trial import start
from tests.support.processes import FROZEN_STATISTICS

STEPS, TURNS = 2, 3
TINY = ("--data.max_classes=24", "--data.batch_size=8", "--data.samples_per_class=4")
SETTINGS = (
    *TINY,
    f"--evaluation.every={STEPS}",
    f"--optimization.steps={STEPS * TURNS}",
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In whatever precision: Accelerate keeps the first one of a process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "changes",
    [
        ("--precision=float64", "--optimization.max_gradient_norm=0.1"),
        pytest.param(
            ("--data.samples_per_class=null", *FROZEN_STATISTICS),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--precision=bf16",), marks=pytest.mark.slow),
    ],
    ids=["clipped, float64", "shuffled, frozen", "bf16"],
)
def test_both_loops_take_the_same_steps(
    changes: tuple[str, ...],
    glyphs_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    view = Glyphs.__getitem__

    def counting(self: Glyphs, key: int | tuple[int, int]) -> tuple[torch.Tensor, int, int]:
        asked.append(key)
        return view(self, key)

    monkeypatch.setattr(Glyphs, "__getitem__", counting)
    settings = [
        f"--recipe={loop.RECIPE}",
        f"--data.root={glyphs_root}",
        f"--output={tmp_path / 'run'}",
        *SETTINGS,
        *changes,
    ]
    command = parse(settings)
    run = OngoingRun(command, settings, start(command.experiment))
    first = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    found = measure(run, STEPS)
    run.record.close()

    assert Counter(Counter(asked).values()) == {
        2: 8 * STEPS * TURNS
    }  # each image once by each loop
    runner = read_table(run.record.path / "records", "training")["loss"]
    assert [loss.item() for loss in found.losses] == runner
    assert len(set(runner)) == STEPS * TURNS
    assert any(
        not torch.equal(first[name], moved) for name, moved in run.state.model.state_dict().items()
    )
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {
        "runner": TURNS,
        "bare": TURNS,
    }


def test_time_is_counted_for_whom_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(loop, "time", clock)

    def passing(seconds: float) -> None:
        clock.now += seconds

    def steps(seconds: float):
        while True:
            passing(seconds)
            yield torch.zeros(())

    times = Turns(steps(1.0), steps=2)
    times.begin()
    for step, _ in zip(range(1, 7), times.watched(steps(0.5)), strict=False):
        passing(2.5)
        if step % 2 == 0:
            times.end(step)
    assert times.seconds == {"runner": [6.0] * 3, "bare": [2.0] * 3}
    assert times.waiting == [1.0] * 3


def test_a_step_draws_what_accelerate_would_seed() -> None:
    drawn = []
    for seed in (partial(seed_generators, device=torch.device("cpu")), set_seed):
        torch.rand(3)
        seed(2**32 - 1)
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]


def arguments(root: Path, *more: str) -> list[str]:
    return [f"--data.root={root}", *TINY, "--rounds=1", "--steps=1", *more]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_command_prints_what_it_found(
    workers: int, glyphs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loop.main(arguments(glyphs_root, f"--data.num_workers={workers}")) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["recipe"].split() == ["glyphs/compare/binomial_horde", "8", "images", "a", "step"]
    assert rows["workers"].split()[0] == str(workers)
    assert float(rows["ratio"].split()[0]) > 0
    assert 0 <= float(rows["waiting"].split()[0].removesuffix("%")) < 100
    assert rows["target"].split()[0] == "0.95"


@pytest.mark.slow
def test_generated_files_are_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--synthetic=160", "--data.image_size=32", "--data.num_workers=0", *TINY]
    assert loop.main([*more, "--rounds=1", "--steps=1", "--data.max_classes=4"]) == 0
    assert "images/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--precision=fp16", "precision: the bare loop does not support it"),
        ("--model.compile=true", "model.compile: the bare loop does not support it"),
        ("--optimisation.steps=4", "optimisation"),
    ],
)
def test_what_the_bare_loop_does_not_do_is_refused(
    change: str, message: str, glyphs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loop.main(arguments(glyphs_root, change)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_several_processes_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        loop.main([])
    assert "runs on one process" in capsys.readouterr().err
