"""The settings of docs/base_losses.md, built as the runner builds them, against the papers' equations."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from pytorch_metric_learning.reducers import SumReducer
from torch import Tensor
from torch.func import functional_call

from benchmarks.settings.class_paths import build
from pml_regularizers import BinomialDevianceLoss, DistributedLoss
from tests.library.test_base_losses import LABELS, vectors
from tests.oracles import base_losses as oracle
from tests.support.processes import ROOT
from tests.support.tolerances import assert_close

PAIRS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])  # ECAML's batches
either = pytest.mark.parametrize("labels", [LABELS, PAIRS], ids=["unequal classes", "pairs"])

RECIPES = {
    name: yaml.safe_load(block)
    for name, block in re.findall(
        r"```yaml\n# (\w+)\n(.*?)```", (ROOT / "docs" / "base_losses.md").read_text(), re.DOTALL
    )
}


def check(
    loss: Callable[..., Tensor], exact: Callable[..., float], *x: Tensor, step: float = 1e-6
) -> None:
    """The value is the oracle's; so is, by finite differences, the slope in a random direction."""
    leaves = [one.clone().requires_grad_() for one in x]
    directions = [torch.randn_like(one) for one in x]
    value = loss(*leaves)
    assert_close(value, exact(*(one.numpy() for one in x)))
    gradients = torch.autograd.grad(value, leaves)
    ends = [
        exact(*((one + sign * step * d).numpy() for one, d in zip(x, directions, strict=True)))
        for sign in (1, -1)
    ]
    slope = sum((g * d).sum().item() for g, d in zip(gradients, directions, strict=True))
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def triplets(mined: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
    a, p, *rest = (indices.tolist() for indices in mined)
    return list(zip(a, p, rest[-1], strict=True))


def documented(name: str) -> tuple[Any, Any]:
    """Loss and miner, built as the runner builds them."""
    recipe = RECIPES[name]
    ((term,), miner) = recipe["losses"], recipe.get("miner")
    loss = build(term["loss"], "loss", num_classes=4, embedding_size=4)
    return loss, miner and build(miner, "miner")


@either
@pytest.mark.parametrize(
    "name", ["horde_contrastive", "horde_triplet", "ecaml_n_pair", "ecaml_binomial"]
)
def test_unmined_losses(name: str, labels: Tensor) -> None:
    (loss, miner), exact = documented(name), getattr(oracle, name)
    assert miner is None
    check(lambda x: loss(x, labels), lambda x: exact(x, labels.tolist()), vectors(len(labels)))


def test_horde_binomial_is_the_class_with_its_own_tests() -> None:
    loss, _ = documented("horde_binomial")
    assert isinstance(loss, BinomialDevianceLoss) and loss.balanced
    assert isinstance(loss.reducer, SumReducer)


@either
def test_ecaml_triplet_takes_semi_hard_negatives(labels: Tensor) -> None:
    loss, miner = documented("ecaml_triplet")
    x = 5 + vectors(len(labels))  # all in one direction or so, that triplets violate the margin
    mined = miner(x, labels)
    assert set(triplets(mined)) == set(oracle.semihard(x.numpy(), labels.tolist()))
    assert len(mined[0]) >= 2
    check(lambda x: loss(x, labels, mined), lambda x: oracle.ecaml_triplet(x, triplets(mined)), x)


def test_margin_loss_of_sampled_triplets_and_its_boundary() -> None:
    loss, miner = documented("attention_margin")
    assert loss.beta.shape == (1,)  # the paper's single one, not one per class
    x = 1 + vectors(len(PAIRS))  # closer than beta, most of them: the two sides do not balance
    sampled = miner(x, PAIRS)
    assert len(sampled[0]) >= 4
    check(
        lambda x, beta: functional_call(loss, {"beta": beta}, (x, PAIRS, sampled)),
        lambda x, beta: oracle.margin(x, PAIRS.tolist(), triplets(sampled), beta[0]),
        x,
        torch.tensor([1.2], dtype=torch.float64),  # float32 has no 1.2
    )


def test_am_softmax_and_its_proxies() -> None:
    loss, _ = documented("jrd_am_softmax")
    check(
        lambda x, w: functional_call(loss.double(), {"W": w.T}, (x, LABELS)),
        lambda x, w: oracle.am_softmax(x, LABELS.tolist(), w),
        vectors(),
        vectors(4),
    )


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_half_precision_in_the_runners_wrapper(name: str) -> None:
    loss, miner = documented(name)
    x = vectors(len(PAIRS), torch.bfloat16)
    mined = miner and miner(x.float(), PAIRS)
    exact = loss(x.float(), PAIRS, mined)
    with torch.autocast("cpu", torch.bfloat16):
        value = DistributedLoss(loss)(x, PAIRS, mined)
    assert value.dtype == torch.float32 and torch.equal(value, exact)
    assert all(parameter.dtype == torch.float32 for parameter in loss.parameters())
