"""The controls of HORDE's mechanism, against sums over single pairs in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from torch import Tensor, nn

from benchmarks.building.controls import (
    FeatureCosFaceLoss,
    FeatureCosinesLoss,
    FeatureProxyAnchorLoss,
    LinearHeadLoss,
    OnePositionHORDELoss,
    PooledFeaturesLoss,
)
from pml_regularizers import BinomialDevianceLoss, DistributedLoss, EmbeddingHead, HORDELoss
from tests.oracles import binomial_deviance, controls, horde
from tests.support.pool import Pool, Processes
from tests.support.tolerances import assert_close

LABELS = [0, 0, 1, 1, 2, 2, 2]
C = 5


def pooled_features() -> Tensor:
    """Not negative, as behind a ReLU."""
    return torch.rand(len(LABELS), C, dtype=torch.float64).requires_grad_()


def value_of(loss: nn.Module, features: Tensor) -> Tensor:
    value: Tensor = loss(torch.randn(len(LABELS), 3), torch.tensor(LABELS), features=features)
    return value


def deviance(power: float = 1, beta: float = 0.5) -> BinomialDevianceLoss:
    return BinomialDevianceLoss(beta=beta, distance=CosineSimilarity(power=power))


def constant(rows: np.ndarray) -> np.ndarray:
    return rows


POWERS: list[tuple[FeatureCosinesLoss, Callable[[np.ndarray], float]]] = [
    *(
        (
            FeatureCosinesLoss(deviance(power), centred=centred),
            lambda x, power=power, prepared=prepared: controls.binomial_deviance(
                prepared(x), LABELS, power
            ),
        )
        for centred, prepared in ((False, constant), (True, controls.centred))
        for power in (1, 3)
    ),
    (
        FeatureCosinesLoss(MultiSimilarityLoss(distance=CosineSimilarity(power=3))),
        lambda x: controls.multi_similarity(x, LABELS, 3),
    ),
]


@pytest.mark.parametrize(("loss", "expected"), POWERS)
def test_a_loss_on_powers_of_the_cosines_of_pooled_features(
    loss: nn.Module, expected: Callable[[np.ndarray], float]
) -> None:
    x = pooled_features()
    value = value_of(loss, x)
    assert_close(value, expected(x.detach().numpy()))
    assert not list(loss.parameters())
    assert torch.autograd.gradcheck(lambda x: value_of(loss, x), x)


@pytest.mark.parametrize(
    ("inner", "rows", "expected"),
    [
        (FeatureProxyAnchorLoss, lambda loss: loss.proxies, controls.proxy_anchor),
        (FeatureCosFaceLoss, lambda loss: loss.W.T, controls.am_softmax),
    ],
)
def test_a_loss_with_proxies_as_wide_as_the_features(
    inner: Any, rows: Callable[[Any], Tensor], expected: Callable[..., float]
) -> None:
    power = 2
    loss = FeatureCosinesLoss(inner(4, C, distance=CosineSimilarity(power=power))).double()
    proxies = rows(loss.losses["pooled"])
    assert proxies.shape == (4, C) and len([*loss.parameters()]) == 1
    x = pooled_features()
    value = value_of(loss, x)
    x, proxies = (tensor.detach().numpy() for tensor in (x, proxies))
    assert_close(value, expected(x, LABELS, proxies, power))


def test_a_loss_on_a_linear_layer_of_its_own() -> None:
    loss = LinearHeadLoss(deviance(), in_channels=C, embedding_size=3).double()
    x = pooled_features()
    value = value_of(loss, x)
    embeddings = x.detach().numpy() @ loss.linear.weight.detach().numpy().T
    assert_close(value, binomial_deviance.binomial_deviance(embeddings, LABELS))
    value.backward()
    assert loss.linear.weight.grad is not None and loss.linear.weight.grad.abs().sum() > 0


def test_horde_on_one_position() -> None:
    settings: dict[str, Any] = {"order": 3, "moment_dim": 16, "projections": "random"}
    loss = OnePositionHORDELoss(deviance(), C, 3, **settings).double()
    x, labels, embeddings = pooled_features(), torch.tensor(LABELS), torch.randn(7, 3).double()
    value = loss(embeddings, labels, features=x)
    same = HORDELoss(deviance(), C, 3, **settings).double()
    same.load_state_dict(loss.state_dict())
    assert torch.equal(value, same(embeddings, labels, features=x[:, :, None, None]))
    matrices = [weight.numpy() for weight in loss.moments.weights()]
    orders = [horde.cascaded([row], matrices) for row in x.detach().numpy()]
    vectors = [embeddings.numpy(), *(np.array(order) for order in zip(*orders, strict=True))]
    assert_close(value, sum(binomial_deviance.binomial_deviance(v, LABELS) for v in vectors))
    head = EmbeddingHead(C, 3)
    loss = OnePositionHORDELoss(deviance(), C, 3, **settings).attach(head)
    maps = torch.rand(7, C, 2, 2, requires_grad=True)
    assert_close(
        loss(head(maps), labels), loss(head(maps), labels, features=maps.mean(dim=(2, 3))).item()
    )


def test_the_loss_of_a_fixed_projection_of_the_pooled_features() -> None:
    loss = PooledFeaturesLoss(deviance(), in_channels=C, width=16)
    x = pooled_features()
    value = value_of(loss, x)
    assert set(loss.projection.unique().tolist()) == {-1, 1}
    assert not list(loss.parameters())
    projected = x.detach().numpy() @ loss.projection.double().numpy()
    assert_close(value, binomial_deviance.binomial_deviance(projected, LABELS))
    assert torch.autograd.gradcheck(lambda x: value_of(loss, x), x)
    head = EmbeddingHead(C, 3)
    loss = PooledFeaturesLoss(deviance(), in_channels=C, width=16).attach(head)
    maps, labels = torch.randn(4, C, 2, 2, requires_grad=True), torch.tensor([0, 0, 1, 1])
    expected = loss(head(maps), labels, features=maps.mean(dim=(2, 3)))
    assert_close(loss(head(maps), labels), expected.item())


def centred_on(processes: Processes) -> tuple[float, Tensor]:
    """Value and gradient of the whole batch's features, from this process's part of them."""
    x = torch.rand(6, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = slice(processes.process_index, None, processes.num_processes)
    own = x[rows].clone().requires_grad_()
    loss = DistributedLoss(FeatureCosinesLoss(deviance(2), centred=True))
    value = loss(torch.zeros(len(own), 2), torch.arange(6)[rows] // 2, features=own)
    value.backward()
    assert own.grad is not None
    return value.item(), own.grad / processes.num_processes  # as DistributedDataParallel


def test_the_mean_is_that_of_the_batch_of_all_processes(pool: Pool) -> None:
    [(value, gradient)] = pool.run(centred_on, processes=1)
    for rank, (found, part) in enumerate(pool.run(centred_on, processes=2)):
        assert found == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(part, gradient[rank::2])
