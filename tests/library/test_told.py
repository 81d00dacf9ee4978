"""What would train less than it seems, or something else, is told at once."""

import gc
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor, nn

from pml_regularizers import (
    CosinePowersLoss,
    DistributedLoss,
    EnsembleLoss,
    HighOrderMoments,
    JRSRegularizer,
)

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of the `with` block, also those that were given before."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


AROUND = (
    lambda loss: loss,
    DistributedLoss,
    lambda loss: DistributedLoss(losses.MultipleLosses([loss])),
)


@pytest.mark.parametrize(
    ("count", "steps", "around"),
    [
        *((1, lambda step: 1, around) for around in AROUND),
        (2, lambda step: 2, DistributedLoss),
        *((2, lambda step: 1 + (step % 5 == 4), around) for around in AROUND),  # the loss's rarely
        (2, lambda step: 2 * (step % 3 == 2), DistributedLoss),  # gradients of three passes
    ],
)
def test_parameters_that_no_optimizer_holds(count: int, steps: Any, around: Any) -> None:
    """An optimizer of the network, and perhaps one of the loss: as many of them as told make a step."""
    network = nn.Sequential(nn.Identity(), nn.Linear(5, 4))
    feature_loss = losses.ProxyAnchorLoss(3, 5)
    loss = CosinePowersLoss(losses.ProxyAnchorLoss(3, 4), feature_loss=feature_loss, powers=(1, 3))
    loss = around(loss.attach(network[0], embedder=network))
    optimizers = [torch.optim.Adam(module.parameters()) for module in (network, loss)[:count]]
    with told() as messages:
        for step in range(7):
            x = torch.rand(6, 5, requires_grad=True)
            loss(network(x), LABELS).backward()
            for optimizer in optimizers[: steps(step)]:
                optimizer.step()
                optimizer.zero_grad()
    assert len(messages) == (count == 1)
    names = [re.findall(r"(?:embeddings|power_\d)\.proxies", x) for x in messages]
    assert all(x == ["embeddings.proxies", "power_1.proxies", "power_3.proxies"] for x in names)


def test_a_parameter_at_the_address_of_one_that_was_told_of() -> None:
    def count(parameters: list[nn.Parameter]) -> int:
        """Warnings of a loss that has these."""
        parts = [losses.ProxyAnchorLoss(3, 4) for _ in parameters]
        for part, parameter in zip(parts, parameters, strict=True):
            part.proxies = parameter
        network, loss = nn.Linear(5, 4), DistributedLoss(losses.MultipleLosses(parts))
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        with told() as messages:
            for _ in range(4):
                loss(network(torch.rand(6, 5)), LABELS).backward()
                optimizer.step()
        return len(messages)

    def made(number: int) -> list[nn.Parameter]:
        return [nn.Parameter(torch.rand(3, 4)) for _ in range(number)]

    first = made(20)
    addresses = {id(x) for x in first}
    assert count(first) == 1
    del first
    gc.collect()
    later = made(10_000)  # all kept: they take the addresses that are free
    again = [x for x in later if id(x) in addresses]
    assert again and count(again[:1]) == 1


def test_an_attribute_of_the_loss_inside_is_not_set_in_vain() -> None:
    inner, miner = losses.CrossBatchMemory(losses.TripletMarginLoss(), 4), BatchHardMiner()
    around: Any = DistributedLoss(inner, miner)
    with pytest.raises(AttributeError, match=r"queue_idx: .* loss\.loss\.queue_idx = "):
        around.queue_idx = 3
    around.loss.loss.margin = 0.5
    assert (inner.queue_idx, inner.miner, around.miner) == (around.queue_idx, None, miner)
    triplet = losses.TripletMarginLoss(margin=0.1)
    for loss in (CosinePowersLoss(triplet), EnsembleLoss(EnsembleLoss(triplet, 2), 2)):
        for outermost in (loss, DistributedLoss(loss)):
            with pytest.raises(AttributeError, match=r"margin: .* set it there, .*\.margin = "):
                outermost.margin = 0.5
            assert outermost.margin == triplet.margin == 0.1
        loss.collect_stats = True


@pytest.mark.parametrize("frozen", [False, True])
def test_passed_features_without_a_gradient(frozen: bool) -> None:
    loss, features = JRSRegularizer(), torch.rand(6, 5)
    if frozen:
        loss.frozen_features = True
    with told() as messages:
        for x in (torch.randn(6, 4), torch.randn(6, 4).requires_grad_(), torch.randn(6, 4)):
            loss.eval()(x, LABELS, features=features)
            loss.train()(x, LABELS, features=features)
    assert len(messages) == (not frozen)
    assert all("set loss.frozen_features = True" in text for text in messages)


@pytest.mark.parametrize(("shift", "powers"), [(0.0, (1, 3)), (1.0, (2, 3)), (0.0, (1, 2))])
def test_even_powers_of_features_of_both_signs(shift: float, powers: tuple[int, ...]) -> None:
    loss = CosinePowersLoss(losses.ContrastiveLoss(), powers=powers)
    with told() as messages:
        for _ in range(2):
            loss(torch.randn(6, 4), LABELS, features=torch.linspace(-1, 1, 30).view(6, 5) + shift)
    assert [x[:17] for x in messages] == ["powers: 2 is even"] * (powers == (1, 2))


def test_a_map_is_pooled_where_pooled_features_are_read() -> None:
    maps, mask = torch.rand(6, 5, 3, 3), torch.arange(7) < torch.arange(1, 7)[:, None]
    tokens = maps.flatten(2)[:, :, :7].mT
    means = (tokens * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    stage, embedder = nn.Identity(), nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(4))
    loss = CosinePowersLoss(losses.ContrastiveLoss())
    loss.attach(stage, embedder=embedder, frozen=True, pool="avg")
    loss.frozen_features = True
    pooled = maps.mean((2, 3))
    for x, right in ((maps, pooled), (maps.permute(0, 2, 3, 1), pooled), (pooled, pooled)):
        embeddings = embedder(stage(x))
        value = loss(embeddings, LABELS)
        torch.testing.assert_close(value, loss(embeddings, LABELS, features=right))
    stage((tokens, mask.long()))
    embeddings = embedder(maps)
    value = loss(embeddings, LABELS)
    torch.testing.assert_close(value, loss(embeddings, LABELS, features=means))


@pytest.mark.parametrize("size", [1e-38, 1e38])
def test_features_at_the_ends_of_the_range_have_their_directions(size: float) -> None:
    loss, x = CosinePowersLoss(losses.TripletMarginLoss()), torch.rand(6, 5)
    embeddings = torch.randn(6, 4)
    found = loss(embeddings, LABELS, features=size * x)
    torch.testing.assert_close(found, loss(embeddings, LABELS, features=x), rtol=1e-4, atol=0)
    if size > 1:
        moments = HighOrderMoments(5, order=5, moment_dim=6, projections="cascaded", scale=False)
        torch.testing.assert_close(moments(size * x[:, None]), moments(x[:, None]))


def test_a_row_of_zeros_has_the_gradient_of_its_tensor_product() -> None:
    x: Tensor = torch.rand(6, 5)
    x[0] = 0
    CosinePowersLoss(losses.TripletMarginLoss())(
        torch.randn(6, 4), LABELS, features=x.requires_grad_()
    ).backward()
    assert x.grad is not None and not x.grad[0].any() and 0 < x.grad.abs().max() < 1e3
