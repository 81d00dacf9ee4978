"""Measurements of time and memory, and their tables."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from speed.measuring import process_bytes, tensor_bytes

FLOATS = 4 * 1000


def keep_and_free() -> Tensor:
    first = torch.zeros(1000)
    second = first + 1  # two at once
    view = second[:500].view(2, 250)
    del first
    third = view * 2  # of half the size, while the second is there
    del second, view
    return third


def reuse() -> Tensor:
    for _ in range(10):
        torch.zeros(1000)
    return torch.zeros(1000)  # where a freed tensor was


def test_tensors_are_counted_while_they_live_without_results_and_what_was_there():
    given = torch.zeros(1000)
    assert tensor_bytes(keep_and_free) == 2 * FLOATS
    assert tensor_bytes(reuse) == FLOATS
    assert tensor_bytes(lambda: [given, given[10:], given + 1]) == 0
    assert tensor_bytes(lambda: {"result": (given + 1) + 1}) == FLOATS
    assert tensor_bytes(lambda: given.add_(1)) == 0


def read_and_allocate(given: Tensor) -> None:
    given.sum()
    np.ones(100 * 2**17)


@pytest.mark.slow
def test_a_process_is_measured_with_numpy_and_without_what_it_is_given():
    call = partial(read_and_allocate, torch.ones(100 * 2**18))
    assert process_bytes(call) == pytest.approx(100 * 2**20, rel=0.1)
