"""The controls of HORDE's mechanism, against sums over single pairs in float64."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.reducers import SumReducer
from torch import Tensor, nn

from benchmarks.building.controls import (
    FeatureCosFaceLoss,
    FeatureCosinesLoss,
    FeatureProxyAnchorLoss,
    LinearHeadLoss,
    OnePositionHORDELoss,
    ProjectedFeaturesLoss,
)
from pml_regularizers import BinomialDevianceLoss, HORDELoss
from tests.oracles import binomial_deviance, controls
from tests.support.tolerances import assert_close

LABELS = [0, 0, 1, 1, 2, 2, 2]
C = 5


def pooled_features() -> Tensor:
    """Not negative, as behind a ReLU."""
    return torch.rand(len(LABELS), C, dtype=torch.float64).requires_grad_()


def value_of(loss: nn.Module, features: Tensor) -> Tensor:
    value: Tensor = loss(torch.randn(len(LABELS), 3), torch.tensor(LABELS), features=features)
    return value


def deviance(power: float = 1) -> BinomialDevianceLoss:
    return BinomialDevianceLoss(distance=CosineSimilarity(power=power), reducer=SumReducer())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (FeatureCosinesLoss(deviance(3)), lambda x: controls.binomial_deviance(x, LABELS, 3)),
        (
            FeatureCosinesLoss(deviance(3), centred=True),
            lambda x: controls.binomial_deviance(controls.centred(x), LABELS, 3),
        ),
        (
            FeatureCosinesLoss(MultiSimilarityLoss(distance=CosineSimilarity(power=3))),
            lambda x: controls.multi_similarity(x, LABELS, 3),
        ),
    ],
)
def test_a_loss_on_powers_of_the_cosines_of_pooled_features(loss, expected):
    x = pooled_features()
    assert_close(value_of(loss, x), expected(x.detach().numpy()))
    assert torch.autograd.gradcheck(lambda x: value_of(loss, x), x)


@pytest.mark.parametrize(
    ("inner", "rows", "expected"),
    [
        (FeatureProxyAnchorLoss, lambda loss: loss.proxies, controls.proxy_anchor),
        (FeatureCosFaceLoss, lambda loss: loss.W.T, controls.am_softmax),
    ],
)
def test_a_loss_with_proxies_as_wide_as_the_features(inner, rows, expected):
    power = 2
    loss = FeatureCosinesLoss(inner(4, C, distance=CosineSimilarity(power=power))).double()
    proxies = rows(loss.losses["power_1"])
    assert proxies.shape == (4, C)
    x = pooled_features()
    value = value_of(loss, x)
    x, proxies = (tensor.detach().numpy() for tensor in (x, proxies))
    assert_close(value, expected(x, LABELS, proxies, power))


def test_a_loss_on_a_linear_layer_of_its_own():
    loss = LinearHeadLoss(deviance(), in_channels=C, embedding_size=3).double()
    x = pooled_features()
    value = value_of(loss, x)
    embeddings = x.detach().numpy() @ loss.linear.weight.detach().numpy().T
    assert_close(value, binomial_deviance.binomial_deviance(embeddings, LABELS))
    value.backward()
    assert loss.linear.weight.grad.abs().sum() > 0


def test_horde_on_one_position():
    settings: dict[str, Any] = {"order": 3, "moment_dim": 16, "projections": "random"}
    loss = OnePositionHORDELoss(deviance(), C, 3, **settings).double()
    x, labels, embeddings = pooled_features(), torch.tensor(LABELS), torch.randn(7, 3).double()
    same = HORDELoss(deviance(), C, 3, **settings).double()
    same.load_state_dict(loss.state_dict())
    expected = same(embeddings, labels, features=x[:, :, None, None])
    assert torch.equal(loss(embeddings, labels, features=x), expected)


def test_the_loss_of_a_fixed_projection_of_the_pooled_features():
    loss = ProjectedFeaturesLoss(deviance(), in_channels=C, width=16)
    x = pooled_features()
    assert set(loss.projection.unique().tolist()) == {-1, 1}
    assert not list(loss.parameters())
    projected = x.detach().numpy() @ loss.projection.double().numpy()
    assert_close(value_of(loss, x), binomial_deviance.binomial_deviance(projected, LABELS))
    assert torch.autograd.gradcheck(lambda x: value_of(loss, x), x)
