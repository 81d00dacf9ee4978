"""Joint similarity against loops over classes and pairs, as mathematics, and in PML's pipelines."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses, miners, reducers
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import (
    ExponentialKernel,
    GaussianKernel,
    GaussianMixtureKernel,
    IntraClassRegularizer,
    JIntraRegularizer,
    JMMDRegularizer,
    JRDLoss,
    JRSRegularizer,
    LaplaceKernel,
    LinearKernel,
    MissingFeaturesError,
    PolynomialKernel,
    between_class_similarity,
    class_cosines,
    intra_class_similarity,
    joint_intra,
    joint_kernel,
    joint_mmd,
)
from tests.oracles import joint_similarity as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH, Network, images

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons
CLASSES = 5
MIXTURE = oracle.gaussian_mixture()
SINGLE = oracle.gaussian_mixture((1.0,))
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


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
    "JMMD squared": (
        lambda *args, **kwargs: JMMDRegularizer(*args, squared=True, **kwargs),
        lambda K, labels: oracle.jmmd(K, labels, squared=True),
    ),
    "JIntra": (JIntraRegularizer, oracle.jintra),
    "JIntra squared": (
        lambda *args, **kwargs: JIntraRegularizer(*args, squared=True, **kwargs),
        lambda K, labels: oracle.jintra(K, labels, squared=True),
    ),
}
each_regularizer = pytest.mark.parametrize("name", REGULARIZERS)


@each_regularizer
@DTYPES
def test_regularizers_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    (make, expected), (embeddings, pooled) = REGULARIZERS[name], batch(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        value = make()(embeddings, LABELS, features={"pooled": pooled})
    K = oracle.joint([MIXTURE, MIXTURE], [numbers(pooled), oracle.unit(numbers(embeddings))])
    total, pairs = expected(K, LABELS.tolist())
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert pairs == 34  # ordered pairs of different classes among classes of 3, 2, 1 and 1
    assert_close(value, total / pairs)


@each_regularizer
def test_the_ordered_sum(name: str) -> None:
    (make, expected), (embeddings, _) = REGULARIZERS[name], batch()
    K = oracle.joint([MIXTURE], [numbers(embeddings)])
    regularizer = make({"embeddings": GaussianMixtureKernel()}, reduction="ordered_sum")
    assert_close(regularizer(embeddings, LABELS), expected(K, LABELS.tolist())[0])


def test_any_number_of_representations_with_their_kernels() -> None:
    embeddings, pooled = batch()
    early, cosines = torch.randn(7, 3).double(), torch.rand(7, CLASSES).double()
    regularizer = JRSRegularizer(
        {
            "early": LaplaceKernel(),
            "pooled": PolynomialKernel(3),
            "embeddings": ExponentialKernel(normalize=True),
            "classes": GaussianKernel(),
        }
    )
    assert regularizer.reads == ("early", "pooled", "classes")
    value = regularizer(
        embeddings, LABELS, features={"classes": cosines, "early": early, "pooled": pooled}
    )
    K = oracle.joint(
        [oracle.laplace(), oracle.polynomial(3), oracle.exponential, SINGLE],
        [numbers(early), numbers(pooled), oracle.unit(numbers(embeddings)), numbers(cosines)],
    )
    total, pairs = oracle.jrs(K, LABELS.tolist())
    assert_close(value, total / pairs)


def test_embeddings_need_not_take_part() -> None:
    embeddings, pooled = batch()
    regularizer = JRSRegularizer({"pooled": GaussianMixtureKernel()})
    total, pairs = oracle.jrs(MIXTURE(numbers(pooled)), LABELS.tolist())
    assert_close(regularizer(embeddings, LABELS, features={"pooled": pooled}), total / pairs)


@DTYPES
def test_intra_class_equals_the_oracle(dtype: torch.dtype) -> None:
    embeddings, _ = batch(dtype=dtype)
    value = IntraClassRegularizer()(embeddings, LABELS)
    K = oracle.gaussian_mixture((1.0,), tau=2.0)(oracle.unit(numbers(embeddings)))
    assert_close(value, oracle.intra_class(K, LABELS.tolist()))


@each_regularizer
def test_gradients_by_finite_differences(name: str) -> None:
    regularizer = REGULARIZERS[name][0](
        {"pooled": GaussianMixtureKernel(bandwidth=9.0), "embeddings": LinearKernel()}
    )
    if name == "JIntra":  # linear kernels of single images have norms, but no more than that
        regularizer.kernels["embeddings"] = PolynomialKernel()

    def value(embeddings: Tensor, pooled: Tensor) -> Tensor:
        return regularizer(embeddings, LABELS, features={"pooled": pooled})

    assert torch.autograd.gradcheck(value, [x.requires_grad_() for x in batch()])


def test_intra_class_gradient_by_finite_differences() -> None:
    regularizer, (embeddings, _) = IntraClassRegularizer(), batch()
    assert torch.autograd.gradcheck(lambda x: regularizer(x, LABELS), embeddings.requires_grad_())


def test_a_value_made_by_hand() -> None:
    """Squared distances 1, 4 and 1, tau 2: exp(-1/2) and exp(-2) between the classes."""
    embeddings = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    labels, single = torch.tensor([0, 1, 1]), {"embeddings": GaussianKernel()}
    a, b = math.exp(-0.5), math.exp(-2)
    assert_close(JRSRegularizer(single)(embeddings, labels), (a + b) / 2)
    assert_close(JRSRegularizer(single, reduction="ordered_sum")(embeddings, labels), 2 * (a + b))
    square = 1 + (1 + a) / 2 - (a + b)
    assert_close(JMMDRegularizer(single, squared=True)(embeddings, labels), -square)
    assert_close(JMMDRegularizer(single)(embeddings, labels), -math.sqrt(square))
    assert_close(JIntraRegularizer(single)(embeddings, labels), -1 - math.sqrt((1 + a) / 2))
    assert_close(IntraClassRegularizer(single)(embeddings, labels), -a)


def test_squared_mmd_is_norms_minus_twice_the_similarity() -> None:
    """Eq. 14, and why the paper prefers the inner product: the rest is intra-class compactness."""
    embeddings, _ = batch()
    jmmd, jintra = (
        embeddings_only(cls, squared=True)(embeddings, LABELS)
        for cls in (JMMDRegularizer, JIntraRegularizer)
    )
    assert_close(jmmd, jintra + 2 * embeddings_only(JRSRegularizer)(embeddings, LABELS))


def test_energy_confusion_is_two_minus_twice_the_linear_similarity() -> None:
    """The mean squared distance of two classes on the unit sphere is 2 - 2 S: opposite directions."""
    embeddings = F.normalize(batch()[0])
    labels = LABELS.tolist()
    x = numbers(embeddings)
    distances, pairs = oracle.over_class_pairs(
        labels,
        lambda a, b: np.mean([oracle.squared_distance(x[i], x[j]) for i in a for j in b]),
    )
    similarity = JRSRegularizer({"embeddings": LinearKernel()})(embeddings, LABELS)
    assert_close(2 - 2 * similarity, distances / pairs)


def test_only_pairs_of_different_classes_have_a_gradient() -> None:
    K = torch.rand(7, 7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(between_class_similarity(K, LABELS), K)
    different = LABELS[:, None] != LABELS
    assert_close(gradient, different.double() / 34)


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


ALL = {
    **{name: make for name, (make, _) in REGULARIZERS.items()},
    "intra-class": lambda: IntraClassRegularizer(
        {"pooled": GaussianMixtureKernel(), "embeddings": GaussianMixtureKernel()}
    ),
    "JRD": lambda: JRDLoss(CLASSES, WIDTH),
}
each_loss = pytest.mark.parametrize("name", ALL)


@each_regularizer
@pytest.mark.parametrize("labels", [[0], [0, 1], [1, 1], [0, 1, 2, 1]], ids=str)
def test_values_of_degenerate_batches(name: str, labels: list[int]) -> None:
    """Nothing between the classes of one class; where all images are the same, a constant."""
    for change in (lambda x: x, torch.zeros_like, lambda x: x[:1].repeat(len(x), 1)):
        embeddings, pooled = (change(x).requires_grad_() for x in batch(len(labels), torch.float32))
        value = ALL[name]()(embeddings, torch.tensor(labels), features={"pooled": pooled})
        value.backward()
        largest = max(x.grad.abs().max() for x in (embeddings, pooled))
        if len(set(labels)) == 1:
            assert value == largest == 0
        elif (embeddings[0] == embeddings[1]).all():
            expected = {"JRS": 1.0, "JIntra": -2.0, "JIntra squared": -2.0}.get(name, 0.0)
            torch.testing.assert_close(value, torch.tensor(expected), atol=1e-6, rtol=0)
            assert largest == 0


@each_loss
@pytest.mark.parametrize("magnitude", [1e-6, 1e4])
def test_units_do_not_matter(name: str, magnitude: float) -> None:
    loss, (embeddings, pooled) = ALL[name](), batch(dtype=torch.float32)
    value = loss(magnitude * embeddings, LABELS, features={"pooled": magnitude * pooled})
    assert_close(value, loss(embeddings, LABELS, features={"pooled": pooled}))


def test_classes_that_coincide_rest() -> None:
    """The norm of eq. 15 has no gradient there: what is printed divides rounding errors by their root."""
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(20, WIDTH)
        embeddings = torch.cat([x, x[torch.randperm(20)]]).requires_grad_()
        value = embeddings_only(JMMDRegularizer)(embeddings, torch.arange(2).repeat_interleave(20))
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert value == 0 and gradient.abs().max() == 0


@each_loss
def test_a_call_draws_no_random_numbers(name: str) -> None:
    loss, (embeddings, pooled) = ALL[name](), batch()
    state = torch.get_rng_state()
    loss(embeddings, LABELS, features={"pooled": pooled})
    assert torch.equal(torch.get_rng_state(), state)


def test_beside_another_loss() -> None:
    network, (x, labels) = Network(), images()
    regularizer = JRSRegularizer().attach(network.head)
    contrastive = losses.ContrastiveLoss()
    both = losses.MultipleLosses([contrastive, regularizer], weights=[1, 0.25])
    embeddings = network(x)
    value = both(embeddings, labels)
    pooled = network.trunk(x).mean(dim=(2, 3))
    alone = JRSRegularizer()(embeddings, labels, features={"pooled": pooled})
    assert_close(value, contrastive(embeddings, labels) + 0.25 * alone)
    value.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JRSRegularizer({}), r"kernels: expected a dict such as .* got \{\}"),
        (lambda: JRSRegularizer(GaussianKernel()), "kernels: expected a dict such as"),
        (
            lambda: JRSRegularizer({"embeddings": torch.exp}),
            "kernels: expected a kernel such as GaussianMixtureKernel.* for embeddings, got",
        ),
        (lambda: JRSRegularizer(reduction="sum"), "reduction: expected one of mean, ordered_sum"),
        (
            lambda: JRSRegularizer({"a.b": LinearKernel()}),
            r"kernels: expected names without dots .* got 'a\.b' \(.*\); choose",
        ),
        (lambda: JRSRegularizer({"": LinearKernel()}), "kernels: expected names .* got ''"),
        (lambda: JRSRegularizer({"values": LinearKernel()}), "kernels: .* got 'values'"),
        (lambda: JRSRegularizer({3: LinearKernel()}), "kernels: expected names .* got 3"),
        (lambda: JRDLoss(3, 4, kernels=[LinearKernel()]), "kernels: expected a dict such as"),
        (lambda: JRDLoss(0, 4), "num_classes: expected at least 1, got 0"),
        (lambda: JRDLoss(3, 0), "embedding_size: expected at least 1, got 0"),
        (
            lambda: JRDLoss(3, 4, similarity_weight=-1.0),
            "similarity_weight: expected at least 0, got -1.0",
        ),
        (lambda: JRDLoss(3, 4, representations="pooled"), "representations: expected names"),
        (lambda: JRDLoss(3, 4, representations=()), "kernels: expected a dict"),
        (
            lambda: JRDLoss(
                3, 4, representations=["embeddings"], kernels={"pooled": LinearKernel()}
            ),
            r"representations: expected names, among them those of all kernels \(pooled\)",
        ),
        (lambda: JRDLoss(3, 4, distance=nn.Identity()), "distance: AM-softmax uses cosines"),
        (
            lambda: JRDLoss(3, 5)(batch()[0], LABELS, features={"pooled": batch()[1]}),
            r"embeddings: expected \(N, 5\), got shape \(7, 4\)",
        ),
        (
            lambda: JRSRegularizer()(
                batch()[0], LABELS, features={"pooled": torch.randn(7, 2, 3, 3)}
            ),
            r"features: expected a matrix \(N, D\) of pooled, got \(7, 2, 3, 3\)",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


K = torch.ones(len(LABELS), len(LABELS))


@pytest.mark.parametrize("measure", [between_class_similarity, joint_mmd, joint_intra])
def test_words_the_functions_do_not_know(measure: Callable[..., Tensor]) -> None:
    message = "reduction: expected one of mean, ordered_sum; got 'sum'"
    with pytest.raises(ValueError, match=message):
        measure(K, LABELS, "sum")


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


@pytest.mark.parametrize("container", [dict, nn.ModuleDict])
def test_each_representation_has_its_kernel(container: Callable[..., Any]) -> None:
    x, kernel = batch()[0], LinearKernel()
    for names, kernels, came in (
        ("a", "ab", "a, b"),
        ("ab", "a", "a"),
        ("", "a", "a"),
        ("", "", "none"),
    ):
        with pytest.raises(ValueError, match=f"kernels: expected one for each .*, got {came}$"):
            joint_kernel(dict.fromkeys(names, x), container(dict.fromkeys(kernels, kernel)))


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


@pytest.mark.parametrize("variant", VARIANTS)
@DTYPES
def test_every_variant_equals_the_oracle(variant: str, dtype: torch.dtype) -> None:
    names, (embeddings, pooled) = VARIANTS[variant], batch(dtype=dtype)
    loss = JRDLoss(CLASSES, WIDTH, representations=names, similarity_weight=0.4)
    features = {"pooled": pooled} if "pooled" in names else None
    assert loss.reads == (("pooled",) if features else ())
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(embeddings, LABELS, features=features)
    metric, similarity = jrd_terms(loss, embeddings, pooled, names)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(value, metric.mean() + 0.4 * similarity)
    assert loss.metric.W.dtype == torch.float32  # PML would have recast it


@pytest.mark.parametrize(("name", "expected"), [("jmmd", oracle.jmmd), ("jintra", oracle.jintra)])
def test_the_comparisons_on_the_papers_kernels(name: str, expected: Callable[..., Any]) -> None:
    embeddings, pooled = batch()
    loss = JRDLoss(CLASSES, WIDTH, regularizer=name, similarity_weight=0.4).double()
    value = loss(embeddings, LABELS, features={"pooled": pooled})
    cosines = oracle.class_cosines(numbers(embeddings), numbers(loss.metric.W))
    K = oracle.joint(
        [MIXTURE, MIXTURE, SINGLE], [numbers(pooled), oracle.unit(numbers(embeddings)), cosines]
    )
    total, pairs = expected(K, LABELS.tolist())
    metric = np.mean(oracle.am_softmax(cosines, LABELS.tolist()))
    assert_close(value, metric + 0.4 * total / pairs)


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


def test_logits_are_scaled_cosines() -> None:
    loss, (embeddings, _) = JRDLoss(CLASSES, WIDTH, scale=7.0), batch(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = loss.get_logits(embeddings)
    cosines = oracle.class_cosines(numbers(embeddings), numbers(loss.metric.W))
    assert_close(logits, 7.0 * torch.from_numpy(cosines))


def test_gradients_of_jrd_by_finite_differences() -> None:
    """Fixed bandwidths, and the class weights as an input."""
    loss = JRDLoss(
        CLASSES,
        WIDTH,
        kernels={
            name: GaussianMixtureKernel(bandwidth=tau)
            for name, tau in (("pooled", 9.0), ("embeddings", 1.5), ("classes", 2.0))
        },
    ).double()

    def value(W: Tensor, embeddings: Tensor, pooled: Tensor) -> Tensor:
        return torch.func.functional_call(
            loss, {"metric.W": W}, (embeddings, LABELS), {"features": {"pooled": pooled}}
        )

    inputs = [x.requires_grad_() for x in (loss.metric.W.detach().clone(), *batch())]
    assert torch.autograd.gradcheck(value, inputs)


def test_reducers_reach_am_softmax_only() -> None:
    embeddings, pooled = batch()
    loss = JRDLoss(CLASSES, WIDTH, reducer=reducers.SumReducer(), similarity_weight=3.0)
    metric, similarity = jrd_terms(loss, embeddings, pooled, VARIANTS["JRD"])
    value = loss(embeddings, LABELS, features={"pooled": pooled})
    assert_close(value, metric.sum() + 3 * similarity)
    loss.set_reducer(reducers.DoNothingReducer())
    found = loss(embeddings, LABELS, features={"pooled": pooled})
    assert found.keys() == {"metric", "similarity"}
    assert_close(found["metric"]["losses"], metric)
    assert_close(found["similarity"]["losses"], 3 * similarity)


def test_class_weights_are_read_once() -> None:
    """Three products with W, as many as AM-softmax takes alone, and two for each kernel."""
    count, width, classes = 12, 64, 500
    loss, embeddings = JRDLoss(classes, width), torch.randn(count, width, requires_grad=True)
    pooled, labels = torch.randn(count, 9, requires_grad=True), torch.arange(count) // 2
    with Count() as forward:
        value = loss(embeddings, labels, features={"pooled": pooled})
    assert width * classes not in forward.storages  # no normalised copy
    with Count() as backward:
        value.backward()
    products = forward.operations["aten.mm"] + backward.operations["aten.mm"]
    assert products == 3 + 2 * len(loss.kernels)


def test_class_weights_of_any_length() -> None:
    W = torch.randn(WIDTH, CLASSES, dtype=torch.float64)
    embeddings, scales = batch()[0], 10.0 ** torch.arange(-6, 9, 3)
    exact = torch.from_numpy(oracle.class_cosines(numbers(embeddings), numbers(W)))
    assert_close(class_cosines(embeddings, W * scales), exact)
    W[:, 2] = 0
    cosines = class_cosines(embeddings, W.requires_grad_())
    (gradient,) = torch.autograd.grad(cosines.square().sum(), W)
    assert (cosines[:, 2] == 0).all() and gradient.isfinite().all()


def test_a_batch_of_one_class_still_trains_the_class_weights() -> None:
    loss, (embeddings, pooled) = JRDLoss(CLASSES, WIDTH), batch()
    loss(embeddings, torch.zeros(7, dtype=torch.long), features={"pooled": pooled}).backward()
    assert loss.metric.W.grad is not None and loss.metric.W.grad.abs().max() > 0


def test_kernels_can_be_chosen_and_weights_start_as_the_authors_do() -> None:
    loss = JRDLoss(CLASSES, WIDTH, kernels={"pooled": LinearKernel(normalize=True)})
    found = {name: type(kernel).__name__ for name, kernel in loss.kernels.items()}
    assert list(found.items()) == [
        ("pooled", "LinearKernel"),
        ("embeddings", "GaussianMixtureKernel"),
        ("classes", "GaussianMixtureKernel"),
    ]
    assert [loss.kernels[name].components for name in ("embeddings", "classes")] == [3, 1]
    assert loss.metric.W.shape == (WIDTH, CLASSES)
    bound = JRDLoss(400, 50).metric.W.abs().max()
    assert 0.0495 < bound <= 0.05  # 1 / sqrt(C), as the authors' code


def test_statistics_and_hyper_parameters_are_recorded() -> None:
    embeddings, pooled = batch()
    loss = JRDLoss(CLASSES, WIDTH, collect_stats=True)
    loss(embeddings, LABELS, features={"pooled": pooled})
    _, similarity = jrd_terms(loss, embeddings, pooled, VARIANTS["JRD"])
    assert math.isclose(loss.similarity, similarity, rel_tol=1e-6)
    assert loss.metric.avg_angle > 0 and loss.kernels["pooled"].mean_distance > 0
    modules = [m for m in loss.modules() if hasattr(m, "_record_these")]
    records = {name: getattr(m, name) for m in modules for name in m._record_these}
    assert records["similarity_weight"] == 1.0 and records["margin"] == 0.1
    kinds = {type(value) for value in records.values()}
    assert kinds <= {int, float, bool, str, list, type(None)}


def test_attached_in_training() -> None:
    network, (x, labels) = Network(), images()
    loss = JRDLoss(4, WIDTH).attach(network.head)
    embeddings = network(x)
    pooled = network.trunk(x).mean(dim=(2, 3))
    with pytest.raises(MissingFeaturesError, match="reads features"):
        JRDLoss(4, WIDTH)(embeddings, labels)
    value = loss(embeddings, labels)
    assert_close(value, loss(embeddings, labels, features={"pooled": pooled}))
    optimizer = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=1e-2)
    for _ in range(30):
        last = loss(network(x), labels)
        optimizer.zero_grad()
        last.backward()
        optimizer.step()
    assert last < 0.8 * value
