"""Joint similarity as mathematics, its cost, and compiled; test_contract.py has the values by the oracles."""

import copy

import pytest
import torch
from pytorch_metric_learning import losses, reducers
from torch import nn
from torch.nn import functional as F

from pml_regularizers import (
    EnergyConfusionRegularizer,
    GaussianMixtureKernel,
    JRDLoss,
    JRSRegularizer,
    PolynomialKernel,
)
from pml_regularizers.losses.jrd_loss import class_cosines
from pml_regularizers.regularizers.joint_similarity_ablations import joint_mmd
from tests.library import expected
from tests.library.contract import Batch, call
from tests.oracles import joint_similarity as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons
CLASSES, WIDTH = 5, 4


def draw() -> Batch:
    """Embeddings and pooled features."""
    x, pooled = (torch.randn(len(LABELS), width, dtype=torch.float64) for width in (WIDTH, 6))
    return Batch(x, LABELS, {"pooled": pooled})


def test_mined_pairs() -> None:
    """Of triplets and of pairs, the negative ones; the joint kernel's own values."""
    batch, kernel = draw(), {"embeddings": GaussianMixtureKernel()}
    K = kernel["embeddings"](batch.embeddings)
    a, p, n = (torch.tensor(index) for index in ([0, 0, 4], [2, 5, 1], [1, 3, 6]))
    for tuples in ((a, p, n), (a, p, a, n)):
        value = JRSRegularizer(kernel)(batch.embeddings, LABELS, tuples)
        assert_close(value, (K[0, 1] + K[0, 3] + K[4, 6]) / 3)


def test_no_tensor_is_larger_than_the_rows() -> None:
    widths, count = {"pooled": 90, "embeddings": 50, "classes": 300}, 40
    x = {name: torch.randn(count, width, requires_grad=True) for name, width in widths.items()}
    regularizer = JRSRegularizer({name: GaussianMixtureKernel() for name in widths})
    embeddings = x.pop("embeddings")
    with Count() as counted:
        regularizer(embeddings, torch.arange(count) // 2, features=x).backward()
    assert max(counted.storages) == count * 300 * 4  # M x M x D would be 40 times as large
    assert counted.operations["aten.mm"] == 2 * len(widths)
    # Features are joined only where processes exchange them.
    assert counted.operations["aten.cat"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "eager",
    [
        JRSRegularizer({"embeddings": GaussianMixtureKernel()}, reducer=reducers.MeanReducer()),
        EnergyConfusionRegularizer(reducer=reducers.MeanReducer()),
    ],
    ids=["JRS", "EC"],
)
def test_one_compiled_graph_serves_all_labels(eager: nn.Module) -> None:
    """For a mean or a sum; other reducers select pairs."""
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="eager")
    for labels in (LABELS, LABELS.clamp(max=1), torch.arange(7), torch.zeros_like(LABELS)):
        x = draw().embeddings.requires_grad_()
        value, again = eager(x, labels), compiled(x, labels)
        (exact,), (found,) = (torch.autograd.grad(part, x) for part in (value, again))
        if labels.any():
            assert_close(again, value.item())
            assert_close(found, exact)
        else:  # no pair of different classes
            assert again == 0 and found.abs().max() == 0


def test_classes_that_coincide_rest() -> None:
    """The norm of eq. 15 has no gradient there: what is printed divides rounding errors by their root."""
    labels = torch.arange(2).repeat_interleave(20)
    for _ in range(5):
        x = torch.randn(20, WIDTH)
        embeddings = torch.cat([x, x[torch.randperm(20)]]).requires_grad_()
        values = joint_mmd(GaussianMixtureKernel()(embeddings), labels)
        (gradient,) = torch.autograd.grad(values.sum(), embeddings)
        assert not values.any() and gradient.abs().max() == 0


def test_margin_and_scale_mean_what_equation_12_says() -> None:
    loss, batch = JRDLoss(CLASSES, WIDTH, margin=0.35, scale=64.0), draw()
    assert (loss.metric.margin, loss.metric.scale) == (0.35, 64.0)  # which the oracle takes
    assert_close(call(loss, batch), expected.jrd(loss, batch))


def test_am_softmax_is_cosface() -> None:
    batch, loss = draw(), JRDLoss(CLASSES, WIDTH, similarity_weight=0.0).double()
    cosface = losses.CosFaceLoss(CLASSES, WIDTH, margin=0.1, scale=20)
    cosface.load_state_dict({"W": loss.metric.W})
    mined = tuple(torch.tensor(index) for index in ([0, 0, 4], [2, 5, 1], [1, 3, 6]))
    for tuples in (None, mined):
        assert_close(call(loss, batch, tuples), cosface(batch.embeddings, LABELS, tuples))
    assert_close(loss.get_logits(batch.embeddings), cosface.get_logits(batch.embeddings))


def test_class_weights_of_any_length() -> None:
    W = torch.randn(WIDTH, CLASSES, dtype=torch.float64)
    embeddings, scales = draw().embeddings, 10.0 ** torch.arange(-6, 9, 3)
    exact = torch.from_numpy(oracle.class_cosines(embeddings.numpy(), W.numpy()))
    unit = F.normalize(embeddings)
    assert_close(class_cosines(unit, W * scales), exact)
    W[:, 2] = 0
    cosines = class_cosines(unit, W.requires_grad_())
    (gradient,) = torch.autograd.grad(cosines.square().sum(), W)
    assert (cosines[:, 2] == 0).all() and gradient.isfinite().all()


def test_kernels_can_be_chosen_and_weights_start_as_the_authors_do() -> None:
    loss = JRDLoss(400, 50, kernels={"pooled": PolynomialKernel(1, 0.0, normalize=True)})
    components = {name: getattr(k, "components", None) for name, k in loss.kernels.items()}
    assert components == {"pooled": None, "embeddings": 3, "classes": 1}
    assert 0.0495 < loss.metric.W.abs().max() <= 0.05  # 1 / sqrt(C), as the authors' code
