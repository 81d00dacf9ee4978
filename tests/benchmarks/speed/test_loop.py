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
SETTINGS = (*TINY, f"--evaluation.every={STEPS}", f"--optimization.steps={STEPS * TURNS}")


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
        ("--precision=float64",),
        pytest.param(("--data.samples_per_class=null", *FROZEN_STATISTICS), marks=pytest.mark.slow),
        pytest.param(("--precision=bf16",), marks=pytest.mark.slow),
    ],
    ids=["float64", "shuffled, frozen", "bf16"],
)
def test_both_loops_take_the_same_steps(
    changes: tuple[str, ...], glyphs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    view = Glyphs.__getitem__

    def counting(self: Glyphs, key: int | tuple[int, int]) -> tuple[torch.Tensor, int, int]:
        asked.append(key)
        return view(self, key)

    monkeypatch.setattr(Glyphs, "__getitem__", counting)
    places = f"--recipe={loop.RECIPE}", f"--data.root={glyphs_root}", f"--output={tmp_path / 'run'}"
    settings = [*places, *SETTINGS, *changes]
    command = parse(settings)
    run = OngoingRun(command, settings, start(command.experiment))
    first = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    found = measure(run, STEPS)
    run.record.close()

    by_both = Counter(Counter(asked).values())
    assert by_both == {2: 8 * STEPS * TURNS}, "each image once by each loop"
    runner = read_table(run.record.path / "records", "training")["loss"]
    assert [loss.item() for loss in found.losses] == runner
    assert len(set(runner)) == STEPS * TURNS
    moved = run.state.model.state_dict()
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in first.items())
    assert {name: len(times) for name, times in found.seconds.items()} == {
        "bare loop": TURNS,
        "runner": TURNS,
    }


def test_time_is_counted_for_whom_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(loop, "time", clock)

    def steps(seconds: float) -> Iterator[torch.Tensor]:
        while True:
            clock.now += seconds
            yield torch.zeros(())

    turns = Turns(steps(1.0), steps=2)
    turns.end(0)
    for step, _ in zip(range(1, 7), turns.watched(steps(0.5)), strict=False):
        clock.now += 2.0
        if step % 2 == 0:
            turns.end(step)
    assert turns.seconds == {"runner": [5.0] * 3, "bare loop": [2.0] * 3}
    said, *_, bare, runner = turns.table(batch_size=10).splitlines()
    assert said.startswith(
        "2 steps of 10 images; the runner: 4.0 images/s, 20.0% of its time waiting"
    )
    assert bare == "| bare loop | 1.00 | 2 s |"
    assert runner == "| runner | 2.50 | 2.50 to 2.50 |"


def test_a_step_draws_what_accelerate_would_seed() -> None:
    drawn = []
    for seed in (partial(seed_generators, device=torch.device("cpu")), set_seed):
        torch.rand(3)
        seed(2**32 - 1)
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_command_prints_what_it_found(
    workers: int, glyphs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--data.root={glyphs_root}", *TINY, "--rounds=1", "--steps=1"]
    assert loop.main([*arguments, f"--data.num_workers={workers}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{loop.RECIPE}, {workers} workers; 1 steps of 8 images; the runner: ")
    assert "\n| bare loop | 1.00 | " in said and "\n| runner | " in said


def test_what_the_bare_loop_does_not_do_is_refused(
    glyphs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loop.main([f"--data.root={glyphs_root}", *TINY, "--precision=fp16"]) == 2
    assert "precision: the bare loop scales no gradients" in capsys.readouterr().err
