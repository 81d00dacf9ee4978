"""The settings of docs/base_losses.md, built as the runner builds them, against the papers' equations."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from benchmarks.building import build
from pml_regularizers import BinomialDevianceLoss, DistributedLoss
from tests.library.test_base_losses import LABELS, vectors
from tests.oracles import base_losses as oracle
from tests.support.processes import ROOT
from tests.support.tolerances import assert_close

PAIRS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])  # ECAML's batches

RECIPES = {
    name: yaml.safe_load(block)
    for name, block in re.findall(
        r"```yaml\n# (\w+)\n(.*?)```", (ROOT / "docs" / "base_losses.md").read_text(), re.DOTALL
    )
}


def check(
    loss: Callable[[Tensor], Tensor], exact: Callable[[np.ndarray], float], *x: Tensor
) -> None:
    """The value is the oracle's, and the gradient the oracle's finite differences."""

    class Exact(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *x: Tensor) -> Tensor:
            ctx.save_for_backward(*x)
            return torch.tensor(exact(*(one.numpy() for one in x)), dtype=torch.float64)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            with torch.enable_grad():
                ours = torch.autograd.grad(loss(*leaves), leaves)
            return tuple(grads[0] * one for one in ours)

    assert_close(loss(*x), exact(*(one.numpy() for one in x)))
    assert torch.autograd.gradcheck(Exact.apply, [one.clone().requires_grad_() for one in x])


def triplets(mined: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
    a, p, *rest = (indices.tolist() for indices in mined)
    return list(zip(a, p, rest[-1], strict=True))


def documented(name: str) -> tuple[Any, Any]:
    """Loss and miner, built as the runner builds them."""
    recipe = RECIPES[name]
    ((term,), miner) = recipe["losses"], recipe.get("miner")
    loss = build(term["loss"], "loss", num_classes=4, embedding_size=4)
    return loss, miner and build(miner, "miner")


# ------------------------------------------------------------------- documented settings = equations


@pytest.mark.parametrize("labels", [LABELS, PAIRS], ids=["unequal classes", "pairs"])
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("horde_contrastive", oracle.horde_contrastive),
        ("horde_triplet", oracle.horde_triplet),
        ("ecaml_n_pair", oracle.ecaml_n_pair),
        ("ecaml_binomial", oracle.ecaml_binomial),
    ],
)
def test_unmined_losses(name: str, exact: Any, labels: Tensor) -> None:
    loss, miner = documented(name)
    assert miner is None
    check(lambda x: loss(x, labels), lambda x: exact(x, labels.tolist()), vectors(len(labels)))


def test_horde_binomial_is_the_class_with_its_own_tests() -> None:
    loss, _ = documented("horde_binomial")
    assert isinstance(loss, BinomialDevianceLoss) and loss.balanced


@pytest.mark.parametrize("labels", [LABELS, PAIRS], ids=["unequal classes", "pairs"])
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
    loss.beta.data = torch.tensor([1.2], dtype=torch.float64)  # float32 has no 1.2
    x = 1 + vectors(len(PAIRS))  # closer than beta, most of them: the two sides do not balance
    sampled = miner(x, PAIRS)
    assert len(sampled[0]) >= 4
    check(
        lambda x: loss(x, PAIRS, sampled),
        lambda x: oracle.margin(x, PAIRS.tolist(), triplets(sampled)),
        x,
    )
    value = loss(x, PAIRS, sampled)
    (gradient,) = torch.autograd.grad(value, loss.beta)
    around = [
        oracle.margin(x.numpy(), PAIRS.tolist(), triplets(sampled), 1.2 + step)
        for step in (1e-3, -1e-3)
    ]
    assert_close(gradient.sum(), (around[0] - around[1]) / 2e-3)


def test_am_softmax_and_its_proxies() -> None:
    loss, _ = documented("jrd_am_softmax")
    proxies = vectors(4)

    def with_proxies(x: Tensor, w: Tensor) -> Tensor:
        value: Tensor = torch.func.functional_call(loss.double(), {"W": w.T}, (x, LABELS))
        return value

    check(with_proxies, lambda x, w: oracle.am_softmax(x, LABELS.tolist(), w), vectors(), proxies)


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
