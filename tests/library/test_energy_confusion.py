"""Energy confusion against the paper in loops, its lemmas, and every contract a PML loss keeps."""

import copy
import math
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, regularizers
from pytorch_metric_learning.distances import BatchedDistance
from torch import Tensor, nn

from pml_regularizers import EnergyConfusionRegularizer, MissingFeaturesError, energy_confusion
from tests.oracles import energy_confusion as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close
from tests.support.toys import Network, images

LABELS = torch.tensor([7, 1, 7, 4, 1, 7, -2])  # -2 and 4 are singletons
CLASSES = torch.unique(LABELS, return_inverse=True)[1]
C = 4
ROWS = [torch.where(row)[0] for row in torch.arange(C).unsqueeze(1) == CLASSES]


def lp(p: float, power: float) -> oracle.Distance:
    return lambda a, b: float((np.abs(a - b) ** p).sum() ** (power / p))


def snr(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.var(a - b, ddof=1) / np.var(a, ddof=1))


# PML's distance; how it normalises (the p of the norm), if it does; the distance itself
DISTANCES: dict[str, tuple[Any, float | None, oracle.Distance]] = {
    "default": (None, 2, oracle.squared_euclidean),
    "raw": (
        distances.LpDistance(power=2, normalize_embeddings=False),
        None,
        oracle.squared_euclidean,
    ),
    "euclidean": (distances.LpDistance(), 2, lp(2, 1)),
    "root": (distances.LpDistance(power=0.5), 2, lp(2, 0.5)),
    "manhattan": (distances.LpDistance(p=1, normalize_embeddings=False), None, lp(1, 1)),
    "snr": (distances.SNRDistance(), 2, snr),  # not symmetric: both orders of a pair count
}
every_distance = pytest.mark.parametrize("distance", DISTANCES)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "ordered_sum"])
every_log = pytest.mark.parametrize("log", [True, False], ids=["log", "plain"])


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 5, dtype=torch.float64).to(dtype)


def build(distance: str = "default", **kwargs: Any) -> EnergyConfusionRegularizer:
    """Regularizer on the embeddings of the call, unless a test is about the other mode."""
    return EnergyConfusionRegularizer(
        **{"gradient": "all", "distance": DISTANCES[distance][0], **kwargs}
    )


def expected_terms(
    embeddings: Tensor,
    labels: Tensor = LABELS,
    distance: str = "default",
    log: bool = True,
) -> dict[tuple[int, int], float]:
    """One term per ordered pair of classes, by the oracle."""
    _, p, function = DISTANCES[distance]
    x = embeddings.detach().double().numpy()
    x = x if p is None else oracle.unit(x, p)
    return oracle.terms(x, labels.tolist(), log=log, distance=function)


def expected(
    embeddings: Tensor, labels: Tensor = LABELS, reduction: str = "mean", **kwargs: Any
) -> float:
    """Value of the regularizer, by the oracle."""
    terms = expected_terms(embeddings, labels, **kwargs).values()
    return math.fsum(terms) / (len(terms) if reduction == "mean" else 1)


def class_sets(x: Tensor) -> list[Sequence[np.ndarray]]:
    return list(oracle.class_sets(x.numpy(), LABELS.tolist()).values())


# Value and gradient


@every_distance
@every_reduction
@every_log
def test_equals_the_oracle(distance: str, reduction: Any, log: bool) -> None:
    embeddings = vectors()
    value = build(distance, reduction=reduction, log=log)(embeddings, LABELS)
    assert value.shape == () and value.dtype == torch.float64
    assert_close(value, expected(embeddings, distance=distance, reduction=reduction, log=log))


@every_distance
@every_reduction
@every_log
def test_gradient_by_finite_differences(distance: str, reduction: Any, log: bool) -> None:
    regularizer = build(distance, reduction=reduction, log=log)
    embeddings = vectors().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: regularizer(x, LABELS), embeddings)


def test_energies_of_classes_equal_the_oracle() -> None:
    x = vectors()
    energies = energy_confusion(x, CLASSES, C)
    sets = class_sets(x)
    exact = [[oracle.energy_confusion(X, Y) for Y in sets] for X in sets]
    assert_close(energies, torch.tensor(exact, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: energy_confusion(x, CLASSES, C), x.requires_grad_())


def test_values_made_by_hand() -> None:
    """Two images at a right angle, of one class, and the image opposite to the first."""
    embeddings = torch.tensor([[3.0, 0.0], [0.0, 0.1], [-2.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([5, 5, 2])
    energy = (4 + 2) / 2
    assert_close(build(log=False)(embeddings, labels), energy)
    assert_close(build()(embeddings, labels), math.log(1 + energy))
    assert_close(build(reduction="ordered_sum")(embeddings, labels), 2 * math.log(1 + energy))


def test_no_tensor_is_larger_than_the_batch_or_the_matrix_of_classes() -> None:
    embeddings = torch.randn(600, 8, requires_grad=True)
    with Count() as count:
        build()(embeddings, torch.arange(600) % 10).backward()
    assert max(count.storages) == 600 * 8
    assert count.operations["aten.mm"] == 3  # of class means: one forward, two backward


# Which embeddings, and where the gradient goes


def test_the_gradient_of_the_default_reaches_the_linear_layer_only() -> None:
    network = Network().double()
    batch, labels = images()
    regularizer = EnergyConfusionRegularizer().attach(network.head)
    embeddings = network(batch.double())
    value = regularizer(embeddings, labels)
    assert_close(value, expected(embeddings, labels))
    value.backward()
    assert all(parameter.grad is None for parameter in network.trunk.parameters())
    own = network.head.fc.weight.grad
    network.zero_grad()
    build()(network(batch.double()), labels).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert own is not None and network.head.fc.weight.grad is not None
    assert_close(own, network.head.fc.weight.grad)


def test_features_that_are_passed() -> None:
    fc = nn.Linear(3, 5, bias=False).double()
    pooled = torch.randn(len(LABELS), 3, dtype=torch.float64, requires_grad=True)
    value = EnergyConfusionRegularizer()(fc(pooled), LABELS, features=fc(pooled.detach()))
    assert_close(value, expected(fc(pooled)))
    value.backward()
    assert pooled.grad is None and fc.weight.grad is not None


def test_features_that_are_no_embeddings() -> None:
    regularizer = EnergyConfusionRegularizer()
    for features in (vectors()[:, :4], vectors().reshape(-1, 5, 1), (vectors(), vectors())):
        with pytest.raises(
            ValueError, match=r"features: gradient=\"fc\" reads embeddings \(n, 5\)"
        ):
            regularizer(vectors(), LABELS, features=features)
    with pytest.raises(MissingFeaturesError, match="attach"):
        regularizer(vectors(), LABELS)
    with pytest.raises(ValueError, match="features"):
        build()(vectors(), LABELS, features=vectors())


# Properties


def test_lemma_2_and_lemma_3() -> None:
    """EC bounds half the energy distance (Lemma 2) and the squared MMD (Lemma 3), which are equal (eq. 6)."""
    for _ in range(5):
        x = vectors() * torch.rand(1, 5, dtype=torch.float64)
        energies = energy_confusion(x, CLASSES, C)
        within = energies.diagonal()
        halves = energies - (within.unsqueeze(1) + within) / 2
        sets = class_sets(x)
        for i, j in ((i, j) for i in range(C) for j in range(C) if i != j):
            half, mmd = (
                oracle.energy_distance(sets[i], sets[j]) / 2,
                oracle.squared_mmd(sets[i], sets[j]),
            )
            assert energies[i, j] >= half - 1e-12 and energies[i, j] >= mmd - 1e-12
            assert_close(halves[i, j], half)
            assert_close(halves[i, j], mmd)
        # Strict where a class varies, tight between singletons.
        assert energies[1, 3] > 1.01 * halves[1, 3]
        assert_close(energies[0, 2], halves[0, 2])


def test_energy_is_the_distance_of_the_means_plus_the_variances() -> None:
    x = vectors()
    means = torch.stack([x[rows].mean(dim=0) for rows in ROWS])
    traces = torch.stack([x[rows].var(dim=0, correction=0).sum() for rows in ROWS])
    exact = (means.unsqueeze(1) - means).square().sum(dim=2) + traces.unsqueeze(1) + traces
    assert_close(energy_confusion(x, CLASSES, C), exact)


def test_on_the_unit_sphere_it_is_two_minus_twice_the_mean_cosine() -> None:
    x = nn.functional.normalize(vectors())
    cosines = x @ x.T
    exact = [[2 - 2 * cosines[rows][:, columns].mean() for columns in ROWS] for rows in ROWS]
    assert_close(energy_confusion(x, CLASSES, C), torch.tensor(exact))


def test_moves_and_rotations_of_all_embeddings_change_nothing() -> None:
    x = vectors()
    rotation = torch.linalg.qr(vectors(5)).Q
    raw = build("raw")
    assert_close(raw(x @ rotation + 1e3, LABELS), raw(x, LABELS))
    assert_close(build()(x @ rotation, LABELS), build()(x, LABELS))


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 2**10), (torch.float64, 2**30)])
def test_an_offset_does_not_drown_the_energies(dtype: torch.dtype, offset: int) -> None:
    x = offset + torch.randint(-9, 9, (len(LABELS), 5), dtype=dtype) / 64  # exact in both
    value = build("raw", log=False)(x, LABELS)
    assert_close(value, expected(x, distance="raw", log=False))


def test_a_step_against_the_gradient_brings_classes_together() -> None:
    x = vectors().requires_grad_()
    regularizer = build("raw", log=False)
    before = regularizer(x, LABELS)
    (gradient,) = torch.autograd.grad(before, x)
    assert regularizer(x - 0.01 * gradient, LABELS) < before
    # Each image is drawn to the means of the other classes: 2 / (C (C - 1)) of the ordered pairs' mean.
    others = torch.stack([x[rows].mean(dim=0) for rows in ROWS[:3]])
    pull = 2 * 2 / (C * (C - 1)) * (3 * x[0] - others.sum(dim=0)) / 3  # class 3 has 3 images
    assert_close(gradient[0], pull)


# A random choice of pairs


def drawn(regularizer: EnergyConfusionRegularizer, x: Tensor, calls: int) -> list[tuple[int, int]]:
    """Pairs of classes that a regularizer with num_pairs=1 draws, deduced from its values."""
    terms = {pair: term for pair, term in expected_terms(x).items() if pair[0] < pair[1]}
    pairs = []
    for _ in range(calls):
        value = regularizer(x, LABELS)
        pairs.append(min(terms, key=lambda pair: abs(terms[pair] - value.item())))
        assert_close(value, terms[pairs[-1]])
    return pairs


def test_draws_are_equally_frequent_and_independent() -> None:
    pairs = drawn(build(num_pairs=1), vectors(), 432)
    # Chi-squared with 5 and 35 degrees of freedom exceeds these once in a thousand.
    for outcomes, kinds, bound in ((pairs, 6, 20.5), (list(pairwise(pairs)), 36, 66.6)):
        counts, fair = Counter(outcomes), len(outcomes) / kinds
        assert len(counts) == kinds
        assert sum((count - fair) ** 2 / fair for count in counts.values()) < bound


@every_reduction
def test_drawn_pairs_are_different_pairs_in_both_orders(reduction: str) -> None:
    x = vectors()
    terms = expected_terms(x)
    low = [terms[pair] for pair in terms if pair[0] < pair[1]]
    for count in (2, 4, 5):
        value = build(num_pairs=count, reduction=reduction, seed=count)(x, LABELS).item()
        scale = 1 / count if reduction == "mean" else 2
        subsets = [
            scale * math.fsum(term for i, term in enumerate(low) if choice >> i & 1)
            for choice in range(2**6)
            if choice.bit_count() == count
        ]
        assert_close(
            torch.tensor(value, dtype=torch.float64), min(subsets, key=lambda s: abs(s - value))
        )


def test_more_pairs_than_there_are_means_all() -> None:
    x = vectors()
    for count in (6, 7, 10**9):
        assert torch.equal(build(num_pairs=count)(x, LABELS), build()(x, LABELS))
    alone = build(num_pairs=3)(x, torch.zeros_like(LABELS))
    assert alone == 0


def test_seeds_draw_differently() -> None:
    x = vectors()
    runs = [drawn(build(num_pairs=1, seed=seed), x, 12) for seed in (0, 0, 1, 2, -1, 2**40 + 3)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 5


def test_draws_go_on_from_a_state_dict() -> None:
    x = vectors()
    regularizer = build(num_pairs=1, seed=1)
    for _ in range(5):
        regularizer(x, LABELS)
    resumed = build(num_pairs=1)
    resumed.load_state_dict(regularizer.state_dict())
    copies = [
        regularizer,
        resumed,
        copy.deepcopy(regularizer),
        pickle.loads(pickle.dumps(regularizer)),
    ]
    rest = [drawn(one, x, 12) for one in copies]
    assert rest[0] == rest[1] == rest[2] == rest[3]
    assert rest[0] != drawn(build(num_pairs=1, seed=1), x, 12)
    assert len(set(rest[0])) > 1
    assert not build().state_dict()
    cast = {"draws": regularizer.draws.bfloat16()}
    with pytest.raises(RuntimeError, match=r"draws: expected signed integers, got torch\.bfloat16"):
        build(num_pairs=1).load_state_dict(cast)


def test_no_generator_is_touched() -> None:
    def states() -> list[Any]:
        legacy = np.random.get_state()  # noqa: NPY002
        return [torch.get_rng_state().tolist(), random.getstate(), legacy[1].tolist()]

    x = vectors()
    before = states()
    regularizer = build(num_pairs=2)
    values = {regularizer(x, LABELS).item() for _ in range(5)}
    assert len(values) > 1 and states() == before


# Degenerate batches


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 2, 3], [0, 1, 1, 1], [5, 5, 2]], ids=str)
@pytest.mark.parametrize("distance", ["default", "euclidean"])
def test_small_batches(labels: list[int], distance: str) -> None:
    x = vectors(len(labels)).requires_grad_()
    regularizer = build(distance)
    assert_close(
        regularizer(x, torch.tensor(labels)), expected(x, torch.tensor(labels), distance=distance)
    )
    assert torch.autograd.gradcheck(lambda x: regularizer(x, torch.tensor(labels)), x)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("distance", ["default", "euclidean"])
@every_reduction
def test_one_class_is_zero_with_a_working_backward(
    count: int, distance: str, reduction: str
) -> None:
    x = vectors(count).requires_grad_()
    value = build(distance, reduction=reduction)(x, torch.full((count,), 3))
    value.backward()
    assert value == 0
    assert x.grad is not None and x.grad.abs().max() == 0


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom is <= 0")  # of nothing, in PML's SNR
@pytest.mark.parametrize("num_pairs", [None, 2])
@every_distance
def test_no_image_is_zero_with_a_working_backward(distance: str, num_pairs: int | None) -> None:
    x = vectors(0).requires_grad_()
    value = build(distance, num_pairs=num_pairs)(x, LABELS[:0])
    value.backward()
    assert value == 0
    assert x.grad is not None and x.grad.shape == x.shape


def test_duplicate_rows() -> None:
    x = vectors()
    x[[0, 1, 3]] = x[2].clone()  # in one class and across classes
    for distance in ("default", "raw", "euclidean", "root"):
        y = x.clone().requires_grad_()
        value = build(distance)(y, LABELS)
        assert_close(value, expected(x, distance=distance))
        value.backward()
        assert y.grad is not None and y.grad.isfinite().all() and y.grad.abs().max() > 0
    same = torch.ones(len(LABELS), 5, dtype=torch.float64, requires_grad=True)
    value = build()(same, LABELS)
    value.backward()
    assert value.abs() < 1e-12
    assert same.grad is not None and same.grad.abs().max() < 1e-12


def test_rounding_makes_no_energy_negative() -> None:
    """Negative energies below -1 would have no logarithm."""
    for _ in range(20):
        x = vectors() * 1e12
        x[[0, 2, 5]] = x[3].clone()
        assert (energy_confusion(x, CLASSES, C) >= 0).all()
        assert build("raw")(x, LABELS).isfinite()


def test_zero_vectors() -> None:
    x = vectors()
    x[2] = 0
    raw = build("raw")
    assert_close(raw(x, LABELS), expected(x, distance="raw"))
    assert torch.autograd.gradcheck(lambda x: raw(x, LABELS), x.clone().requires_grad_())
    for batch in (x, torch.zeros_like(x)):
        y = batch.float().requires_grad_()
        value = build()(y, LABELS)
        value.backward()
        assert value.isfinite()
        assert y.grad is not None and y.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e4])
@pytest.mark.parametrize("distance", ["default", "raw"])
@every_log
def test_magnitudes(scale: float, distance: str, log: bool) -> None:
    x = (vectors() * scale).float().requires_grad_()
    with torch.no_grad():
        x[3] = x[6] * (1 + 1e-4)  # two classes close together, far from the others
    regularizer = build(distance, log=log)
    value = regularizer(x, LABELS)
    assert_close(value, expected(x, distance=distance, log=log))
    value.backward()
    exact = x.detach().double().requires_grad_()
    regularizer(exact, LABELS).backward()
    assert x.grad is not None and exact.grad is not None
    assert_close(x.grad, exact.grad)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("labels", [LABELS, torch.zeros_like(LABELS)], ids=["classes", "one class"])
def test_what_is_no_number_propagates(odd: float, labels: Tensor) -> None:
    x = vectors()
    x[2, 0] = odd
    for distance in ("default", "raw", "euclidean"):
        assert build(distance)(x, labels).isnan()


# PML


def test_beside_a_metric_loss() -> None:
    x = vectors(dtype=torch.float32)
    base, regularizer = losses.ContrastiveLoss(), build()
    both = losses.MultipleLosses([base, regularizer], weights=[1, 0.3])
    assert_close(both(x, LABELS), (base(x, LABELS) + 0.3 * regularizer(x, LABELS)).item())
    # Tuples of a miner are those of the metric loss.
    mined = miners.BatchHardMiner()(x, LABELS)
    assert torch.equal(regularizer(x, LABELS, mined), regularizer(x, LABELS))
    sparse = build(embedding_regularizer=regularizers.LpRegularizer(), embedding_reg_weight=2.0)
    assert_close(sparse(x, LABELS), (regularizer(x, LABELS) + 2 * x.norm(dim=1).mean()).item())


def test_records() -> None:
    x = vectors()
    plain = build(num_pairs=4, seed=2)
    recorded = {name: getattr(plain, name) for name in plain._record_these}
    assert recorded == {
        "reduction": "mean",
        "log": True,
        "gradient": "all",
        "num_pairs": 4,
        "seed": 2,
    }
    assert "between_class_energy" not in vars(plain)
    for reduction in ("mean", "ordered_sum"):
        counting = build(reduction=reduction, collect_stats=True)
        value = counting(x, LABELS)
        assert torch.equal(value, build(reduction=reduction)(x, LABELS))
        assert "between_class_energy" in counting._record_these_stats
        exact = expected(x, log=False)
        assert_close(torch.tensor(counting.between_class_energy, dtype=torch.float64), exact)


def test_statistics_of_the_distance_are_kept() -> None:
    x = vectors()
    distance = distances.LpDistance(power=2, collect_stats=True)
    regularizer = EnergyConfusionRegularizer(gradient="all", distance=distance)
    regularizer(x, LABELS)
    assert_close(
        torch.tensor(regularizer.distance.initial_avg_query_norm), x.norm(dim=1).mean().item()
    )


@pytest.mark.parametrize("num_pairs", [None, 2])
def test_compiled_without_a_graph_break(num_pairs: int | None) -> None:
    """One graph serves batches of any number of classes; values and gradients are those of the loops."""
    torch._dynamo.reset()
    eager = build(num_pairs=num_pairs)
    # fullgraph=True alone would let a number of classes go to Python, which waits for the device.
    found = torch._dynamo.explain(copy.deepcopy(eager))(vectors(), LABELS)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for labels in (LABELS, LABELS.clamp(max=1), torch.arange(7), torch.zeros(7, dtype=torch.long)):
        x = vectors().requires_grad_()
        value, again = eager(x, labels), compiled(x, labels)
        if value > 0:
            assert_close(again, value.item())
            assert_close(torch.autograd.grad(again, x)[0], torch.autograd.grad(value, x)[0])
        else:
            assert again == 0
            assert torch.autograd.grad(again, x)[0].abs().max() == 0


def test_compiled_with_the_network() -> None:
    torch._dynamo.reset()
    network = Network().double()
    batch, labels = images()
    regularizer = EnergyConfusionRegularizer().attach(network.head)

    def step(batch: Tensor) -> Tensor:
        return regularizer(network(batch), labels)

    value = torch.compile(step, fullgraph=True, backend="aot_eager")(batch.double())
    assert_close(value, expected(network(batch.double()), labels))
    value.backward()
    weight = network.head.fc.weight
    gradient, weight.grad = weight.grad, None
    regularizer.clear()
    step(batch.double()).backward()
    assert gradient is not None and weight.grad is not None
    assert_close(gradient, weight.grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "sum"}, "reduction: expected one of mean, ordered_sum; got 'sum'"),
        ({"gradient": "trunk"}, "gradient: expected one of fc, all; got 'trunk'"),
        ({"num_pairs": 0}, "num_pairs: expected a whole number from 1 on, or None .*, got 0"),
        ({"num_pairs": 2.5}, r"num_pairs: expected a whole number from 1 on.*, got 2\.5"),
        ({"seed": 0.5}, r"seed: expected a whole number, got 0\.5"),
        ({"distance": "l2"}, "distance: expected one of PML's distances, .* got 'l2'"),
        (
            {"distance": BatchedDistance(distances.LpDistance())},
            "distance: expected one of PML's distances, .* got BatchedDistance",
        ),
        ({"distance": distances.CosineSimilarity()}, "distance: .* similarity CosineSimilarity"),
        ({"distance": distances.DotProductSimilarity()}, "distance: .* DotProductSimilarity"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnergyConfusionRegularizer(**arguments)


def test_embeddings_that_are_no_vectors() -> None:
    with pytest.raises(ValueError, match=r"embeddings: expected \(N, E\), got shape \(7, 5, 3\)"):
        build()(torch.randn(7, 5, 3), LABELS)
