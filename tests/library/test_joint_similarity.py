"""Joint similarity against loops over classes and pairs, as mathematics, and in PML's pipelines."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor

from pml_regularizers import (
    GaussianKernel,
    GaussianMixtureKernel,
    IntraClassRegularizer,
    JIntraRegularizer,
    JMMDRegularizer,
    JRDLoss,
    JRSRegularizer,
    PolynomialKernel,
)
from pml_regularizers.joint_similarity import (
    between_class_similarity,
    intra_class_similarity,
    joint_intra,
    joint_mmd,
)
from pml_regularizers.jrd import class_cosines
from tests.oracles import joint_similarity as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH

LINEAR = PolynomialKernel(1, constant=0.0)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons
CLASSES = 5
MIXTURE = oracle.gaussian_mixture()
SINGLE = oracle.gaussian_mixture((1.0,))


def batch(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Embeddings and pooled features."""
    return tuple(torch.randn(count, w, dtype=torch.float64).to(dtype) for w in (WIDTH, CHANNELS))


def embeddings_only(cls: type[JRSRegularizer], **kwargs: Any) -> JRSRegularizer:
    return cls({"embeddings": GaussianMixtureKernel()}, **kwargs)


def numbers(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


# The regularizers ---------------------------------------------------------------------------------------------

REGULARIZERS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[float, int]]]] = {
    "JRS": (JRSRegularizer, oracle.jrs),
    "JMMD": (JMMDRegularizer, oracle.jmmd),
    "JIntra": (JIntraRegularizer, oracle.jintra),
}
each_regularizer = pytest.mark.parametrize("name", REGULARIZERS)


@each_regularizer
def test_the_ordered_sum(name: str) -> None:
    (make, expected), (embeddings, _) = REGULARIZERS[name], batch()
    K = oracle.joint([MIXTURE], [numbers(embeddings)])
    regularizer = make({"embeddings": GaussianMixtureKernel()}, reduction="ordered_sum")
    assert_close(regularizer(embeddings, LABELS), expected(K, LABELS.tolist())[0])


def test_a_value_made_by_hand() -> None:
    """Squared distances 1, 4 and 1, tau 2: exp(-1/2) and exp(-2) between the classes."""
    embeddings = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    labels, single = torch.tensor([0, 1, 1]), {"embeddings": GaussianKernel()}
    a, b = math.exp(-0.5), math.exp(-2)
    assert_close(JRSRegularizer(single)(embeddings, labels), (a + b) / 2)
    assert_close(JRSRegularizer(single, reduction="ordered_sum")(embeddings, labels), 2 * (a + b))
    square = 1 + (1 + a) / 2 - (a + b)
    assert_close(JMMDRegularizer(single)(embeddings, labels), -math.sqrt(square))
    assert_close(JIntraRegularizer(single)(embeddings, labels), -1 - math.sqrt((1 + a) / 2))
    assert_close(IntraClassRegularizer(single)(embeddings, labels), -a)


def test_no_tensor_is_larger_than_the_rows() -> None:
    widths, count = {"pooled": 90, "embeddings": 50, "classes": 300}, 40
    x = {name: torch.randn(count, width, requires_grad=True) for name, width in widths.items()}
    regularizer = JRSRegularizer({name: GaussianMixtureKernel() for name in widths})
    embeddings = x.pop("embeddings")
    with Count() as counted:
        regularizer(embeddings, torch.arange(count) // 2, features=x).backward()
    assert max(counted.storages) == count * 300  # M x M x D would be 40 times as large
    assert counted.operations["aten.mm"] == 2 * len(widths)
    assert (
        counted.operations["aten.cat"] == 0
    )  # features are joined only where processes exchange them


def test_classes_that_coincide_rest() -> None:
    """The norm of eq. 15 has no gradient there: what is printed divides rounding errors by their root."""
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(20, WIDTH)
        embeddings = torch.cat([x, x[torch.randperm(20)]]).requires_grad_()
        value = embeddings_only(JMMDRegularizer)(embeddings, torch.arange(2).repeat_interleave(20))
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert value == 0 and gradient.abs().max() == 0


K = torch.ones(len(LABELS), len(LABELS))


@pytest.mark.parametrize(
    "measure", [between_class_similarity, joint_mmd, joint_intra, intra_class_similarity]
)
@pytest.mark.parametrize(
    ("matrix", "labels"),
    [(K, LABELS[:1]), (K, LABELS[:, None]), (K[:1], LABELS), (K[:, :1], LABELS), (K[0], LABELS)],
    ids=["one label", "a column of labels", "one row", "one column", "a vector"],
)
def test_shapes_that_would_be_broadcast(
    measure: Callable[..., Tensor], matrix: Tensor, labels: Tensor
) -> None:
    with pytest.raises(ValueError, match=r"labels: expected a kernel matrix \(N, N\) and a vector"):
        measure(matrix, labels)


# JRD ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "JRD": ("pooled", "embeddings", "classes"),
    "MRD": ("embeddings",),
    "JRD-C": ("pooled", "embeddings"),
    "JRD-Pooling": ("embeddings", "classes"),
}


def jrd_terms(
    loss: JRDLoss, embeddings: Tensor, pooled: Tensor, names: tuple[str, ...], **settings: float
) -> tuple[np.ndarray, float]:
    """AM-softmax of each sample, and L_JRS / N_pairs, by the oracle."""
    cosines = oracle.class_cosines(numbers(embeddings), numbers(loss.metric.W))
    rows = {
        "pooled": (MIXTURE, numbers(pooled)),
        "embeddings": (MIXTURE, oracle.unit(numbers(embeddings))),
        "classes": (SINGLE, cosines),
    }
    K = oracle.joint([rows[name][0] for name in names], [rows[name][1] for name in names])
    total, pairs = oracle.jrs(K, LABELS.tolist())
    return np.array(oracle.am_softmax(cosines, LABELS.tolist(), **settings)), total / pairs


@pytest.mark.parametrize(("m", "s"), [(0.05, 20.0), (0.35, 64.0), (0.0, 1.0)])
def test_margin_and_scale_mean_what_equation_12_says(m: float, s: float) -> None:
    loss, (embeddings, pooled) = JRDLoss(CLASSES, WIDTH, margin=m, scale=s), batch()
    metric, similarity = jrd_terms(loss, embeddings, pooled, VARIANTS["JRD"], m=m, s=s)
    assert_close(loss(embeddings, LABELS, features={"pooled": pooled}), metric.mean() + similarity)


def test_am_softmax_is_cosface() -> None:
    embeddings, pooled = batch()
    loss = JRDLoss(CLASSES, WIDTH, similarity_weight=0.0).double()
    cosface = losses.CosFaceLoss(CLASSES, WIDTH, margin=0.1, scale=20)
    cosface.load_state_dict({"W": loss.metric.W})
    value = loss(embeddings, LABELS, features={"pooled": pooled})
    assert_close(value, cosface(embeddings, LABELS))
    mined = miners.TripletMarginMiner()(embeddings, LABELS)
    assert_close(
        loss(embeddings, LABELS, mined, features={"pooled": pooled}),
        cosface(embeddings, LABELS, mined),
    )
    assert_close(loss.get_logits(embeddings), cosface.get_logits(embeddings))


def test_class_weights_of_any_length() -> None:
    W = torch.randn(WIDTH, CLASSES, dtype=torch.float64)
    embeddings, scales = batch()[0], 10.0 ** torch.arange(-6, 9, 3)
    exact = torch.from_numpy(oracle.class_cosines(numbers(embeddings), numbers(W)))
    assert_close(class_cosines(embeddings, W * scales), exact)
    W[:, 2] = 0
    cosines = class_cosines(embeddings, W.requires_grad_())
    (gradient,) = torch.autograd.grad(cosines.square().sum(), W)
    assert (cosines[:, 2] == 0).all() and gradient.isfinite().all()


def test_kernels_can_be_chosen_and_weights_start_as_the_authors_do() -> None:
    loss = JRDLoss(CLASSES, WIDTH, kernels={"pooled": PolynomialKernel(1, 0.0, normalize=True)})
    found = {name: type(kernel).__name__ for name, kernel in loss.kernels.items()}
    assert list(found.items()) == [
        ("pooled", "PolynomialKernel"),
        ("embeddings", "GaussianMixtureKernel"),
        ("classes", "GaussianMixtureKernel"),
    ]
    assert [loss.kernels[name].components for name in ("embeddings", "classes")] == [3, 1]
    assert loss.metric.W.shape == (WIDTH, CLASSES)
    bound = JRDLoss(400, 50).metric.W.abs().max()
    assert 0.0495 < bound <= 0.05  # 1 / sqrt(C), as the authors' code
