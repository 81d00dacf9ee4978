"""The loop does what is due after a step, in order."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from torch import nn

from benchmarks.training.loop import Trainer, seed_generators

LOG, EVALUATE, SAVE = "log", "evaluate", "save"


def due(step: int, steps: int = 31, every: int = 5, **stopping: bool) -> list[str]:
    settings = SimpleNamespace(
        evaluation=SimpleNamespace(every=every),
        checkpoint_every=6,
        optimization=SimpleNamespace(chunk_size=None),
    )
    state: Any = SimpleNamespace(step=step, loss=nn.Identity())
    calls: Any = dict.fromkeys((LOG, EVALUATE, SAVE))
    trainer = Trainer(state, SimpleNamespace(steps=steps), settings, **calls)  # type: ignore[arg-type]
    trainer.log_every = 4
    return [name for name, is_due in trainer.due(**stopping)._asdict().items() if is_due]


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
    assert due(step) == expected
    assert due(step, stopping=True) == stopping
    assert EVALUATE not in due(step, every=0)


def test_a_step_draws_what_accelerate_would_seed() -> None:
    drawn = []
    for seed in (partial(seed_generators, device=torch.device("cpu")), set_seed):
        torch.rand(3)
        seed(2**32 - 1)
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]
