"""The loop does what is due after a step, in order."""

from functools import partial

import pytest

from benchmarks.training.loop import due

LOG, EVALUATE, SAVE = "log", "evaluate", "checkpoint"


@pytest.mark.parametrize(
    ("step", "expected", "stopping"),
    [
        (0, [EVALUATE], [EVALUATE]),
        (1, [], [LOG, SAVE]),
        (4, [LOG], [LOG, SAVE]),
        (5, [LOG, EVALUATE], [LOG, EVALUATE, SAVE]),
        (6, [LOG, SAVE], [LOG, SAVE]),
        (30, [LOG, EVALUATE, SAVE], [LOG, EVALUATE, SAVE]),
        (31, [LOG, EVALUATE, SAVE], [LOG, EVALUATE, SAVE]),
    ],
)
def test_what_is_due(step: int, expected: list[str], stopping: list[str]) -> None:
    of_step = partial(due, step, 31, log_every=4, evaluate_every=5, checkpoint_every=6)
    assert of_step() == expected
    assert of_step(stopping=True) == stopping


def test_without_evaluations() -> None:
    every = {"log_every": 4, "evaluate_every": 0, "checkpoint_every": 6}
    assert due(0, 8, **every) == []
    assert due(8, 8, **every) == [LOG, SAVE]
