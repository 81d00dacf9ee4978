"""Losses on powers of cosines, against the same losses on explicit tensor products of the features."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import distances, losses
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import (
    BinomialDevianceLoss,
    CosinePowersLoss,
    EmbeddingHead,
    MissingFeaturesError,
    PooledFeaturesLoss,
)
from pml_regularizers.losses.tensor_product_distances import (
    TensorProductDistance,
    TensorProductSimilarity,
)
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
    powers = CosinePowersLoss(loss, powers=[k], power_weights=0.5)
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
    cosines = TensorProductSimilarity(3).pairwise_distance(x, y)
    assert_close(cosines, (tensor_products(x, 3) * tensor_products(y, 3)).sum(dim=1))


def test_equal_features_have_a_finite_gradient() -> None:
    embeddings, x = batch()
    x = x[:1].expand(len(LABELS), C).detach().clone().requires_grad_()
    CosinePowersLoss(losses.TripletMarginLoss())(embeddings, LABELS, features=x).backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_term_beside_a_loss_with_proxies_and_its_short_form() -> None:
    x, head = batch()[1], EmbeddingHead(C, E).double()
    narrow, wide = losses.ProxyAnchorLoss(3, E), losses.ProxyAnchorLoss(3, C)
    short = CosinePowersLoss(copy.deepcopy(narrow), feature_loss=copy.deepcopy(wide)).double()
    term = PooledFeaturesLoss(wide).attach(head)
    loss = losses.MultipleLosses([narrow, term]).double()
    value = loss(head(x[:, :, None, None]), LABELS)
    grads = torch.autograd.grad(value, [*head.parameters(), *loss.parameters(), x])
    expected = short(head(x[:, :, None, None]), LABELS, features=x)
    right = torch.autograd.grad(expected, [*head.parameters(), *short.parameters(), x])
    for found, exact in zip((value, *grads), (expected, *right), strict=True):
        torch.testing.assert_close(found, exact)
        assert exact.abs().sum() > 0
    # Of the given objects, the parameters themselves are trained; each further power has its own.
    assert [p.shape[1] for p in loss.parameters()] == [p.shape[1] for p in short.parameters()]
    assert loss.losses[0] is narrow and term.losses["power_2"].proxies is wide.proxies
    names = [f"losses.{name}.proxies" for name in ("embeddings", "power_2", "power_3")]
    assert names == [name for name, _ in short.named_parameters()]
    for again in (copy.deepcopy(term), pickle.loads(pickle.dumps(term))):
        assert again.losses["power_2"].proxies is not wide.proxies
        embeddings = head(x[:, :, None, None])
        same = again(embeddings, LABELS, features=x)
        assert_close(same, term(embeddings, LABELS, features=x).item())
    with pytest.raises(MissingFeaturesError, match="MultipleLosses, which hands no features on"):
        term.detach()
        loss(embeddings, LABELS)


def test_power_1_alone_is_the_loss_itself() -> None:
    embeddings, x = batch()
    angular = losses.AngularLoss()
    term = PooledFeaturesLoss(angular, powers=(1,), power_weights=[0.5])
    assert term.losses["power_1"] is angular
    assert_close(term(embeddings, LABELS, features=x), 0.5 * angular(x, LABELS).item())
