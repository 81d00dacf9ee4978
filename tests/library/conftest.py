"""The loss that a test of the contract is about, by its name in `contract.LOSSES`, and a batch for it."""

import pytest
from torch import nn

from tests.library.contract import LOSSES, Batch, Case


@pytest.fixture
def case(name: str) -> Case:
    return LOSSES[name]


@pytest.fixture
def loss(case: Case) -> nn.Module:
    return case.make()


@pytest.fixture
def batch(case: Case) -> Batch:
    return Batch.draw(case)
