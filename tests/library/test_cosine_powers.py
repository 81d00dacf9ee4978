"""Losses on powers of cosines, against the same losses on explicit tensor products of the features."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import distances, losses
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import BinomialDevianceLoss, CosinePowersLoss
from pml_regularizers.losses.cosine_powers_loss import TensorProductDistance
from tests.support.tolerances import assert_close

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
C, E = 5, 3
SHARED = distances.CosineSimilarity()


def batch() -> tuple[Tensor, Tensor]:
    """Embeddings, and features that are not negative, as behind a ReLU."""
    features = torch.rand(len(LABELS), C, dtype=torch.float64).requires_grad_()
    return torch.randn(len(LABELS), E, dtype=torch.float64), features


def tensor_products(features: Tensor, k: int) -> Tensor:
    unit = F.normalize(features)
    product = unit
    for _ in range(k - 1):
        product = (product[:, :, None] * unit[:, None]).flatten(1)
    return product


@pytest.mark.parametrize(
    "loss",
    [
        BinomialDevianceLoss(),
        losses.ContrastiveLoss(neg_margin=1.2),
        losses.MarginLoss(),
        losses.MultiSimilarityLoss(),
        losses.NTXentLoss(),
        losses.TripletMarginLoss(distance=distances.CosineSimilarity(power=2)),
        losses.MultipleLosses(
            [losses.NTXentLoss(distance=SHARED), losses.NCALoss(distance=SHARED)]
        ),
    ],
    ids=lambda loss: type(loss).__name__,
)
@pytest.mark.parametrize("k", [1, 3])
def test_a_power_is_the_loss_on_tensor_products(loss: nn.Module, k: int) -> None:
    embeddings, x = batch()
    powers = CosinePowersLoss(loss, powers=[k], power_weight=0.5)
    value = powers(embeddings, LABELS, features=x)
    expected = loss(embeddings, LABELS) + 0.5 * loss(tensor_products(x, k), LABELS)
    assert_close(value, expected.item())
    found, right = (torch.autograd.grad(v, x)[0] for v in (value, expected))
    assert right.abs().max() > 1e-3
    torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-10)


def test_near_features_do_not_cancel() -> None:
    x = F.normalize(torch.rand(4, C, dtype=torch.float64))
    y = F.normalize(x + 1e-5 * torch.randn(4, C, dtype=torch.float64))
    found = TensorProductDistance(3).pairwise_distance(x.float(), y.float())
    products = [tensor_products(rows, 3) for rows in (x.float().double(), y.float().double())]
    right = (products[0] - products[1]).norm(dim=1)
    torch.testing.assert_close(found.double(), right, rtol=0.1, atol=0)


def test_equal_features_have_a_finite_gradient() -> None:
    embeddings, x = batch()
    x = x[:1].expand(len(LABELS), C).detach().clone().requires_grad_()
    CosinePowersLoss(losses.TripletMarginLoss())(embeddings, LABELS, features=x).backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_loss_with_proxies_has_some_as_wide_as_the_features() -> None:
    embeddings, x = batch()
    wide = losses.ProxyAnchorLoss(3, C)
    narrow = losses.ProxyAnchorLoss(3, E)
    loss = CosinePowersLoss(narrow, feature_loss=wide).double()
    shapes = [tuple(parameter.shape) for parameter in loss.parameters()]
    assert shapes == [(3, E), (3, C), (3, C)]
    loss(embeddings, LABELS, features=x).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())
    names = [name for name, _ in loss.named_parameters()]
    assert names == [f"losses.{name}.proxies" for name in ("embeddings", "power_2", "power_3")]
    assert loss.losses["embeddings"] is narrow and loss.losses["power_2"].proxies is wide.proxies
    for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert again.losses["embeddings"].proxies is not narrow.proxies
        assert_close(
            again(embeddings, LABELS, features=x), loss(embeddings, LABELS, features=x).item()
        )
