"""What the library overrides of the classes offered to PML has their values and their gradients."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners, reducers
from pytorch_metric_learning.utils import distributed as pml_distributed
from torch import Tensor

import pml_regularizers as library
from pml_regularizers.offered.losses import horde_loss, jrs_loss
from pml_regularizers.offered.utils import rank_accuracy_calculator
from tests.support import gradients
from tests.support.pool import Pool, Processes
from tests.support.processes import ROOT
from tests.support.tolerances import assert_close

sys.path.insert(0, str(ROOT / "tools"))

import upstream

LABELS = torch.tensor([4, 4, 1, 1, 1, 7, 7, 2])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same(
    found: Tensor, expected: Tensor, inputs: list[Tensor], others: list[Tensor] | None = None
) -> None:
    """Value, and gradients of the inputs; of the expected one for `others`, if they are not the same tensors."""
    assert_close(found, expected)
    gradients = torch.autograd.grad(found, inputs)
    for one, other in zip(gradients, torch.autograd.grad(expected, others or inputs), strict=True):
        assert_close(one.reshape(other.shape), other)


@pytest.mark.parametrize(
    ("order", "shape", "train"),
    [(2, (8, 6, 3, 2), True), (5, (8, 4, 6), True), (5, (8, 4, 6), False)],
)
def test_horde(order: int, shape: tuple[int, ...], train: bool) -> None:
    base, kind = losses.TripletMarginLoss(), horde_loss.HORDELoss
    theirs = kind(base, 6, 5, order, moment_dim=9, train_projections=train)
    projections: Any = "cascaded" if train else "random"
    ours = library.HORDELoss(base, 6, 5, order=order, moment_dim=9, projections=projections)
    theirs, ours = theirs.double(), ours.double()
    mine = [*ours.moments.weights(), *ours.embeddings.parameters()]
    weights = list(theirs.parameters())
    assert len(mine) == len(weights) == (2 * order - 1 if train else order)
    for weight, other in zip(weights, mine, strict=True):
        weight.data = other.data.double().clone()

    x, features = random(8, 5), random(*shape)
    tuples = miners.BatchHardMiner()(x, LABELS)
    found = theirs(x, LABELS, tuples, features=features)
    expected = ours(x, LABELS, tuples, features=features)
    trained = weights if train else [], mine if train else []
    assert_same(found, expected, *([x, features, *each] for each in trained))


@pytest.mark.parametrize(
    ("reducer", "mined"), [(None, miners.BatchHardMiner()), (reducers.SumReducer(), None)]
)
def test_joint_similarity(reducer: Any, mined: Any) -> None:
    x, pooled = random(8, 5), random(8, 7)
    theirs = jrs_loss.JRSLoss(reducer=reducer)
    ours, tuples = library.JRSRegularizer(reducer=reducer), mined and mined(x, LABELS)
    found = theirs(x, LABELS, tuples, features=[pooled])
    assert_same(found, ours(x, LABELS, tuples, features={"pooled": pooled}), [x, pooled])


@pytest.mark.parametrize("options", [{}, {"avg_of_avgs": True}, {"return_per_class": True}])
@pytest.mark.parametrize("within", [True, False])
def test_rank_accuracy(options: dict[str, Any], within: bool) -> None:
    module = rank_accuracy_calculator
    calculators = [
        kind(exclude=("NMI", "AMI"), kmeans_func=print, device=torch.device("cpu"), **options)
        for kind in (module.RankAccuracyCalculator, library.RankAccuracyCalculator)
    ]
    query, labels = torch.randint(3, (70, 6)).float(), torch.randint(9, (70,))  # with many ties
    references = () if within else (torch.randint(3, (90, 6)).float(), torch.randint(2, 9, (90,)))
    found, expected = (each.get_accuracy(query, labels, *references) for each in calculators)
    assert found == {name: pytest.approx(value) for name, value in expected.items()}
    assert len(found) == 8


CASES = ("triplet", "proxy anchor", "HORDE of arcface", "variance")


def measure(processes: Processes, source: str) -> list[dict[str, Any]]:
    """Losses and gradients under PML's wrapper, whose module has another source meanwhile."""
    before = dict(vars(pml_distributed))
    exec(source, vars(pml_distributed))
    gradients.DistributedLossWrapper = pml_distributed.DistributedLossWrapper
    try:
        return [gradients.measure(case, processes, pml=True) for case in CASES]
    finally:
        vars(pml_distributed).update(before)
        gradients.DistributedLossWrapper = before["DistributedLossWrapper"]


@pytest.mark.slow
def test_distributed(pool: Pool) -> None:
    """With the patch, PML multiplies neither the value nor class weights' gradients by the processes."""
    path = Path("src/pytorch_metric_learning/utils/distributed.py")
    source = upstream.SOURCES / "distributed" / path.with_suffix(".py.patch")
    old = Path(pml_distributed.__file__).read_text()
    new = upstream.patched(old, path, source.read_text())
    assert new != old
    expected = [gradients.measure(case, None) for case in CASES]
    for by_process in pool.run(measure, new, processes=3):
        for found, right in zip(by_process, expected, strict=True):
            assert_close(found["loss"], right["loss"])
            for name, gradient in right["gradients"].items():
                assert_close(found["gradients"][name], gradient)
