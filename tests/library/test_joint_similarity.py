"""Joint similarity against loops over classes and pairs, as mathematics, and in PML's pipelines."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning import losses, miners, reducers
from torch import Tensor
from torch.nn import functional as F

from pml_regularizers import (
    GaussianKernel,
    GaussianMixtureKernel,
    IntraClassRegularizer,
    JRDLoss,
    JRSRegularizer,
    PolynomialKernel,
)
from pml_regularizers.losses.jrd_loss import class_cosines
from pml_regularizers.regularizers.joint_similarity import (
    intra_class_similarity,
    joint_intra,
    joint_mmd,
)
from tests.library import expected
from tests.library.contract import Batch, call
from tests.oracles import joint_similarity as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons
CLASSES = 5


def pairs() -> Batch:
    """Embeddings and pooled features."""
    x, pooled = (torch.randn(len(LABELS), w, dtype=torch.float64) for w in (WIDTH, CHANNELS))
    return Batch(x, LABELS, {"pooled": pooled})


# The regularizers ---------------------------------------------------------------------------------------------


def test_mined_pairs() -> None:
    """Of triplets and of pairs, the negative ones; the joint kernel's own values."""
    batch, kernel = pairs(), {"embeddings": GaussianMixtureKernel()}
    K = kernel["embeddings"](batch.embeddings)
    a, p, n = (torch.tensor(index) for index in ([0, 0, 4], [2, 5, 1], [1, 3, 6]))
    for tuples in ((a, p, n), (a, p, a, n)):
        value = JRSRegularizer(kernel)(batch.embeddings, LABELS, tuples)
        assert_close(value, (K[0, 1] + K[0, 3] + K[4, 6]) / 3)


def test_a_value_made_by_hand() -> None:
    """Squared distances 1, 4 and 1, tau 2: exp(-1/2) and exp(-2) between the classes."""
    embeddings = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    labels, single = torch.tensor([0, 1, 1]), {"embeddings": GaussianKernel()}
    a, b = math.exp(-0.5), math.exp(-2)
    K, different = GaussianKernel()(embeddings), labels[:, None] != labels
    assert_close(JRSRegularizer(single)(embeddings, labels), (a + b) / 2)
    square = 1 + (1 + a) / 2 - (a + b)
    assert_close(joint_mmd(K, labels)[different], [-math.sqrt(square)] * 4)
    assert_close(joint_intra(K, labels)[different], [-1 - math.sqrt((1 + a) / 2)] * 4)
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


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, at a graph break
@pytest.mark.parametrize("reducer", ["MeanReducer", "SumReducer", "AvgNonZeroReducer"])
def test_compiled(reducer: str) -> None:
    """One graph serves all labels for a mean or a sum; other reducers select pairs."""
    torch.compiler.reset()
    kernels = {"embeddings": GaussianMixtureKernel()}
    eager = JRSRegularizer(kernels, reducer=getattr(reducers, reducer)())
    whole = reducer != "AvgNonZeroReducer"
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=whole, backend="eager")
    for labels in (LABELS, torch.arange(7), torch.zeros(7, dtype=torch.long)):
        x = pairs().embeddings.requires_grad_()
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
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(20, WIDTH)
        embeddings = torch.cat([x, x[torch.randperm(20)]]).requires_grad_()
        values = joint_mmd(GaussianMixtureKernel()(embeddings), labels)
        (gradient,) = torch.autograd.grad(values.sum(), embeddings)
        assert not values.any() and gradient.abs().max() == 0


K = torch.ones(len(LABELS), len(LABELS))


@pytest.mark.parametrize("measure", [joint_mmd, joint_intra, intra_class_similarity])
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


@pytest.mark.parametrize(("m", "s"), [(0.05, 20.0), (0.35, 64.0), (0.0, 1.0)])
def test_margin_and_scale_mean_what_equation_12_says(m: float, s: float) -> None:
    loss, batch = JRDLoss(CLASSES, WIDTH, margin=m, scale=s), pairs()
    assert (loss.metric.margin, loss.metric.scale) == (m, s)  # which the oracle takes
    assert_close(call(loss, batch), expected.jrd(loss, batch))


def test_am_softmax_is_cosface() -> None:
    batch, loss = pairs(), JRDLoss(CLASSES, WIDTH, similarity_weight=0.0).double()
    embeddings, pooled = batch.embeddings, batch.features["pooled"]
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
    embeddings, scales = pairs().embeddings, 10.0 ** torch.arange(-6, 9, 3)
    exact = torch.from_numpy(oracle.class_cosines(embeddings.numpy(), W.numpy()))
    unit = F.normalize(embeddings)
    assert_close(class_cosines(unit, W * scales), exact)
    W[:, 2] = 0
    cosines = class_cosines(unit, W.requires_grad_())
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
