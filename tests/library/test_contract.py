"""Contract of every public loss and module, in any precision, state, batch and PML slot."""

import copy
import inspect
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses, reducers, regularizers
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import BaseReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn

import pml_regularizers
from pml_regularizers import (
    DivergenceLoss,
    EnergyConfusionRegularizer,
    FeatureLoss,
    IntraClassRegularizer,
    JRDLoss,
    JRSRegularizer,
    LinearRamp,
    MissingFeaturesError,
    ScheduledLosses,
    VarianceRegularizer,
)
from pml_regularizers._pair_loss import PairLoss
from pml_regularizers.feature_loss import LabelAwareRegularizer
from tests.library.contract import CLASSES, LABELS, LOSSES, MODULES, WIDTH, Batch, Case, call, feed
from tests.support.tolerances import BOUNDS, assert_close

HALF = (torch.float16, torch.bfloat16)
BASES = {"FeatureLoss", "ReproducingKernel"}

MADE = {name: case.make() for name, case in LOSSES.items()}  # to choose by; tests make their own


def those(holds: Callable[[Any], bool]) -> pytest.MarkDecorator:
    """The cases whose loss is such."""
    return pytest.mark.parametrize("name", [name for name, loss in MADE.items() if holds(loss)])


def one_per_class() -> list[str]:
    """The first case of each class of losses."""
    return list({type(loss): name for name, loss in reversed(MADE.items())}.values())


def takes_int64_only(loss: nn.Module) -> bool:
    """PML's losses with proxies do, also as base losses."""
    return any(
        type(part) in (losses.ArcFaceLoss, losses.ProxyAnchorLoss) for part in loss.modules()
    )


each_loss = pytest.mark.parametrize("name", LOSSES)
each_module = pytest.mark.parametrize("name", MODULES)
each_pml_loss = those(lambda loss: isinstance(loss, BaseMetricLossFunction))
reads_features = pytest.mark.parametrize("name", [n for n, case in LOSSES.items() if case.features])


def test_every_public_class_is_held_to_the_contract() -> None:
    public = {
        name
        for name in pml_regularizers.__all__
        if inspect.isclass(found := getattr(pml_regularizers, name))
        and issubclass(found, nn.Module)
    }
    modules = [case.make() for case in MODULES.values()]
    assert {type(made).__name__ for made in [*MADE.values(), *modules]} == public - BASES
    assert len(one_per_class()) + len({type(made) for made in modules}) == len(public - BASES)


Measured = dict[str, Any]


def measure(
    loss: nn.Module,
    batch: Batch,
    tuples: tuple[Tensor, ...] | None = None,
    *,
    dtype: torch.dtype | None = None,
    autocast: bool = False,
) -> Measured:
    """The value of a fresh copy of a loss, and all its gradients: None where none arrives."""
    loss = copy.deepcopy(loss).to(dtype)
    batch = batch.map(lambda x: x.detach().clone().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = call(loss, batch, tuples)
    inputs = dict(batch.tensors()) | dict(loss.named_parameters())
    gradients = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    return {"value": value.detach(), **dict(zip(inputs, gradients, strict=True))}


def exact(loss: nn.Module, batch: Batch) -> Measured:
    return measure(loss, batch.to(torch.float64), dtype=torch.float64)


def assert_agree(found: Measured, expected: Measured, scales: Measured | None = None) -> None:
    """Everything is as expected, up to the bound of its dtype, relative to its largest entry.

    A degenerate batch may have a gradient of zero, where the bound is relative to that of `scales`.
    """
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        result = found[name]
        assert (result is None) == (right is None), name
        if result is None or right is None:
            continue
        assert result.isfinite().all() and right.isfinite().all(), name
        size = right.abs().max().item()
        if scales is not None and scales[name] is not None:
            size = max(size, scales[name].abs().max().item())
        torch.testing.assert_close(
            result.double(), right.double(), rtol=0, atol=BOUNDS[result.dtype] * size,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def assert_same(found: Measured, expected: Measured) -> None:
    """Assert equality to the bit."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        result = found[name]
        assert (result is None) == (right is None), name
        assert result is None or right is None or torch.equal(result, right), name


def check_gradients_arrive(case: Case, found: Measured) -> None:
    """Everything that the loss depends on gets a gradient, own parameters without exception."""
    for name, gradient in found.items():
        if name != "embeddings" or case.embeddings:
            assert gradient is not None, name


# The equations


@pytest.mark.parametrize("name", [name for name, case in LOSSES.items() if case.exact])
def test_values_equal_the_oracles(name: str) -> None:
    """Of a regular batch, of two images, and of classes of one image each."""
    case = LOSSES[name]
    for labels in (LABELS, torch.tensor([3, 0]), torch.tensor([3, 0, 2, 1])):
        loss, batch = case.make().double(), Batch.draw(case, labels).to(torch.float64)
        expected = case.exact(loss, batch) if case.exact else 0
        value = call(loss, batch)
        if expected == 0 and labels is not LABELS:
            assert value == 0
        else:
            assert_close(value, expected)


@each_loss
def test_gradients_by_finite_differences(name: str) -> None:
    """In a random direction of each input and each parameter; averages that adapt are constants to them."""
    case, step = LOSSES[name], 1e-6
    loss, batch = case.make().double(), Batch.draw(case).to(torch.float64)
    for part in loss.modules():
        if getattr(part, "bandwidth", 1.0) is None:
            part.bandwidth = 1.3
    found = measure(loss, batch)
    for part, x in [*batch.tensors(), *loss.named_parameters()]:
        if found[part] is None:
            continue
        direction, values = torch.randn_like(x), []
        for sign in (1, -1):
            with torch.no_grad():
                x += sign * step * direction
                values.append(measure_value(loss, batch))
                x -= sign * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        bound = 1e-6 * (found[part].norm() * direction.norm()).item()
        assert slope == pytest.approx((found[part] * direction).sum().item(), rel=0, abs=bound), (
            part
        )


def measure_value(loss: nn.Module, batch: Batch) -> float:
    with torch.enable_grad():
        return float(measure(loss, batch)["value"])


# Precision


@each_loss
def test_the_regular_batch_has_a_value_and_gradients(name: str) -> None:
    """The values that the comparisons below compare are not zero."""
    case = LOSSES[name]
    loss = case.make()
    found = measure(loss, Batch.draw(case))
    check_gradients_arrive(case, found)
    for part, result in found.items():
        assert result is None or result.abs().max() > 0, part


@each_loss
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_inputs_of_any_precision(name: str, dtype: torch.dtype) -> None:
    case = LOSSES[name]
    loss = case.make()
    batch = Batch.draw(case).to(dtype)
    found, expected = measure(loss, batch), exact(loss, batch)
    assert found["value"].dtype in (torch.float32, torch.float64)
    for part in dict(batch.tensors()):
        assert found[part] is None or found[part].dtype == dtype
    # The parameters are of float32, and so is what they take part in.
    lowered = {
        k: v.float() if v is not None and v.dtype == torch.float64 else v for k, v in found.items()
    }
    assert_agree(lowered, expected)


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(name: str, dtype: torch.dtype) -> None:
    case = LOSSES[name]
    loss = case.make()
    batch = Batch.draw(case).to(dtype)
    assert_same(measure(loss, batch, autocast=True), measure(loss, batch))


@each_loss
def test_parameters_are_never_recast(name: str) -> None:
    case = LOSSES[name]
    loss = case.make()
    before = {
        key: (value, value.dtype, value.data_ptr()) for key, value in loss.state_dict().items()
    }
    for dtype in (*HALF, torch.float32, torch.float64):
        call(loss, Batch.draw(case).to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            call(loss, Batch.draw(case).to(dtype))
    after = {
        key: (value, value.dtype, value.data_ptr()) for key, value in loss.state_dict().items()
    }
    assert {k: v[1:] for k, v in after.items()} == {k: v[1:] for k, v in before.items()}


@each_loss
def test_to_float64(name: str) -> None:
    case = LOSSES[name]
    loss = case.make().to(torch.float64)
    found = measure(loss, Batch.draw(case).to(torch.float64))
    assert {x.dtype for x in found.values() if x is not None} == {torch.float64}


# Arguments that every loss of PML takes

REDUCERS: dict[str, Callable[[], Any]] = {
    "AvgNonZeroReducer": reducers.AvgNonZeroReducer,
    "ClassWeightedReducer": lambda: reducers.ClassWeightedReducer(torch.linspace(1, 2, CLASSES)),
    "DivisorReducer": reducers.DivisorReducer,
    "DoNothingReducer": reducers.DoNothingReducer,
    "MeanReducer": reducers.MeanReducer,
    "PerAnchorReducer": reducers.PerAnchorReducer,
    "SumReducer": reducers.SumReducer,
    "ThresholdReducer": lambda: reducers.ThresholdReducer(low=0.01, high=100),
}


def test_these_are_all_reducers() -> None:
    found = {name for name, value in vars(reducers).items() if inspect.isclass(value)}
    assert found - {BaseReducer.__name__, "MultipleReducers"} == REDUCERS.keys()


@each_pml_loss
@pytest.mark.parametrize("reducer", REDUCERS)
def test_every_reducer(name: str, reducer: str) -> None:
    """Applied to each part of the loss; where there is nothing to reduce, without effect."""
    case = LOSSES[name]
    if not case.reducer:
        with pytest.raises(ValueError, match=r"reducer: .* has its own; pass it there"):
            case.make(reducer=REDUCERS[reducer]())
        return
    bare, unreduced, reduced = (
        case.make(reducer=made) for made in (None, reducers.DoNothingReducer(), REDUCERS[reducer]())
    )
    for loss in (unreduced, reduced):
        loss.load_state_dict(bare.state_dict())
    batch = Batch.draw(case).map(lambda x: x.requires_grad_())
    parts: Any = call(unreduced, batch)
    assert parts.keys() == set(bare.sub_loss_names())
    value = call(reduced, batch)
    if reducer == "DoNothingReducer":
        assert value.keys() == parts.keys()
        return
    expected = sum(
        REDUCERS[reducer]()({part: info}, batch.embeddings, LABELS) for part, info in parts.items()
    )
    torch.testing.assert_close(value, expected)
    if all(info["reduction_type"] == "already_reduced" for info in parts.values()):
        assert torch.equal(value, call(bare, batch))
    value.backward()


@each_pml_loss
def test_statistics_change_nothing_and_are_plain_values(name: str) -> None:
    case = LOSSES[name]
    silent, counting = case.make(collect_stats=False), case.make(collect_stats=True)
    counting.load_state_dict(silent.state_dict())
    batch = Batch.draw(case)
    assert_same(measure(counting, batch), measure(silent, batch))
    call(counting, batch)
    call(silent, batch)
    records = {
        f"{type(module).__name__}.{name}": getattr(module, name)
        for module in counting.modules()
        for kind in ("_record_these", "_record_these_stats")
        for name in getattr(module, kind, [])
    }
    assert records
    for record, value in records.items():
        assert isinstance(value, (int, float, str, list, type(None))), record


@each_pml_loss
def test_there_is_a_distance_where_it_counts(name: str) -> None:
    """Neither shown nor recorded where nothing uses it."""
    loss = LOSSES[name].make()
    uses = isinstance(loss, (PairLoss, EnergyConfusionRegularizer, DivergenceLoss))
    assert ("distance" in dict(loss.named_children())) == uses


@those(lambda loss: getattr(loss, "embedding_regularizer", loss) is None)
def test_an_embedding_regularizer_is_added(name: str) -> None:
    case = LOSSES[name]
    batch = Batch.draw(case)
    regularizer = regularizers.LpRegularizer()
    bare = case.make()
    loss = case.make(embedding_regularizer=regularizer, embedding_reg_weight=0.5)
    loss.load_state_dict(bare.state_dict())
    torch.testing.assert_close(
        call(loss, batch), call(bare, batch) + 0.5 * regularizer(batch.embeddings)
    )


# Tuples, labels, reference sets, features


def all_triplets() -> tuple[Tensor, ...]:
    return tuple(lmu.get_all_triplets_indices(LABELS))


def all_pairs() -> tuple[Tensor, ...]:
    return tuple(lmu.get_all_pairs_indices(LABELS))


@each_loss
@pytest.mark.parametrize("mined", [all_pairs, all_triplets])
def test_mined_tuples(name: str, mined: Callable[[], tuple[Tensor, ...]]) -> None:
    """Some of them make another value where the equation has tuples, and the same where it has none."""
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    some = tuple(index[:5] for index in mined())
    found, expected = measure(loss, batch, some), measure(loss, batch)
    if not case.tuples:
        assert_same(found, expected)
        return
    assert all(x is None or x.isfinite().all() for x in found.values())
    assert not torch.isclose(found["value"], expected["value"])
    check_gradients_arrive(case, found)


@those(lambda loss: not takes_int64_only(loss))
def test_labels_of_any_integer_type(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    other = Batch(batch.embeddings, batch.labels.to(torch.int32), batch.features)
    assert_same(measure(loss, other), measure(loss, batch))


@each_pml_loss
def test_without_labels(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    other = Batch(batch.embeddings, None, batch.features)
    if case.labels:
        with pytest.raises(ValueError, match="labels"):
            call(loss, other)
    else:
        assert torch.equal(call(loss, other), call(loss, batch))


@each_pml_loss
def test_reference_sets(name: str) -> None:
    """Refused by the losses that read features, of one batch; the pair losses compare with it."""
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    reference = {"ref_emb": torch.randn(len(LABELS), WIDTH), "ref_labels": LABELS}
    if isinstance(loss, FeatureLoss):
        with pytest.raises(ValueError, match="ref_emb: "):
            loss(batch.embeddings, batch.labels, **reference)
    else:
        value = loss(batch.embeddings, batch.labels, **reference)
        assert value.isfinite() and not torch.equal(value, call(loss, batch))


@reads_features
def test_missing_features(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    with pytest.raises(MissingFeaturesError):
        loss(batch.embeddings, batch.labels)
    fewer = batch.map(lambda x: x[:-1]).features
    with pytest.raises(ValueError, match=r"features"):
        call(loss, Batch(batch.embeddings, batch.labels, fewer))


@those(lambda loss: isinstance(loss, FeatureLoss) and loss.reads)
def test_features_from_a_tap_are_those_that_are_passed(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    feed(loss, batch)
    assert torch.equal(loss(batch.embeddings, batch.labels), call(loss, batch))


@those(lambda loss: isinstance(loss, regularizers.BaseRegularizer))
def test_the_slot_of_embedding_regularizers(name: str) -> None:
    """Passes no labels: what needs them says where it goes instead."""
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    outer = losses.ContrastiveLoss(embedding_regularizer=loss, embedding_reg_weight=0.5)
    feed(loss, batch)
    if isinstance(loss, LabelAwareRegularizer):
        with pytest.raises(ValueError, match=r"labels: .* MultipleLosses"):
            outer(batch.embeddings, batch.labels)
    else:
        bare = losses.ContrastiveLoss()(batch.embeddings, batch.labels)
        expected = bare + 0.5 * call(loss, batch)
        feed(loss, batch)
        torch.testing.assert_close(outer(batch.embeddings, batch.labels), expected)


@each_loss
@pytest.mark.parametrize("total", [losses.MultipleLosses, ScheduledLosses])
def test_weight_zero_is_the_base_loss_to_the_bit(name: str, total: Any) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    base = losses.ContrastiveLoss()
    weight: Any = 0.0 if total is losses.MultipleLosses else LinearRamp(0, 1, 10)
    both = total([base, loss], weights=[1.0, weight])
    found, expected = measure(both, batch), measure(base, batch)
    for part in ("value", "embeddings"):
        assert torch.equal(found[part], expected[part])
    for part, result in found.items():
        if part not in ("value", "embeddings"):
            assert result is not None and not result.any(), part


# Batches


def duplicated(x: Tensor) -> Tensor:
    return x[torch.arange(len(x)) // 2]


def first_is_zero(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[1:]])


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "identical": lambda x: x[:1].expand_as(x),
    "duplicated": duplicated,
    "zero": torch.zeros_like,
    "first is zero": first_is_zero,
}
BATCHES = {
    "regular": (LABELS, list(ROWS)),
    "two classes": (torch.tensor([3, 0]), list(ROWS)),
    "two of a class": (torch.tensor([1, 1]), ["random", "identical", "first is zero"]),
    "one class": (torch.tensor([2, 2, 2, 2]), ["random", "zero"]),
    "singletons": (torch.tensor([3, 0, 2, 1]), ["random", "identical"]),
    "one image": (torch.tensor([1]), ["random", "zero"]),
}


@each_loss
def test_degenerate_batches(name: str) -> None:
    """Finite, with gradients everywhere, and right: as in float64."""
    case = LOSSES[name]
    loss = case.make()
    scales = measure(loss, Batch.draw(case))
    for kind, (labels, rows) in BATCHES.items():
        batch = Batch.draw(case, labels)
        for change in rows:
            changed = batch.map(ROWS[change])
            found = measure(loss, changed)
            try:
                check_gradients_arrive(case, found)
                assert_agree(found, exact(loss, changed), scales)
            except AssertionError as error:
                raise AssertionError(f"{kind}, {change} rows: {error}") from None


@each_loss
def test_an_empty_batch(name: str) -> None:
    """Nothing is lost: 0, with a gradient of 0 for every parameter, as in a process that got no image."""
    case = LOSSES[name]
    found = measure(case.make(), Batch.draw(case, LABELS[:0]))
    assert found["value"] == 0
    check_gradients_arrive(case, found)
    assert not any(x.any() for x in found.values() if x is not None)


@each_loss
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1e4])
def test_magnitudes(name: str, magnitude: float) -> None:
    case = LOSSES[name]
    loss = case.make()
    batch = Batch.draw(case).map(lambda x: magnitude * x)
    found = measure(loss, batch)
    check_gradients_arrive(case, found)
    assert_agree(found, exact(loss, batch))


@each_loss
def test_the_order_of_the_batch_does_not_matter(name: str) -> None:
    case = LOSSES[name]
    loss = case.make().double()
    batch = Batch.draw(case).to(torch.float64)
    order = torch.randperm(len(LABELS))
    expected = measure(loss, batch)
    for part, _ in batch.tensors():
        gradient = expected[part]
        expected[part] = None if gradient is None else gradient[order]
    assert_agree(measure(loss, batch.take(order)), expected)


@those(lambda loss: not takes_int64_only(loss) and not isinstance(loss, JRDLoss))
def test_names_of_classes_do_not_matter(name: str) -> None:
    """Unless a loss has weights of its own for each class."""
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    renamed = torch.tensor([3, 7, 50, 100])[batch.labels]
    other = Batch(batch.embeddings, renamed, batch.features)
    assert_same(measure(loss, other), measure(loss, batch))


@each_loss
def test_nan_shows(name: str) -> None:
    """One number that is none, anywhere in what the value depends on, spoils it."""
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    for part, x in batch.tensors():
        if part == "embeddings" and not case.embeddings:
            continue
        kept = x.flatten()[4].clone()
        x.view(-1)[4] = float("nan")
        assert call(loss, batch).isnan(), part
        x.view(-1)[4] = kept
    assert call(loss, batch).isfinite()


# State


@contextmanager
def generators_untouched() -> Iterator[None]:
    def state() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002  the global generator, on purpose
        return torch.get_rng_state().tolist(), name, keys.tolist(), rest, random.getstate()

    before = state()
    yield
    assert state() == before


@each_loss
def test_a_call_draws_no_random_numbers(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    with generators_untouched():
        measure(loss, batch)


@each_loss
def test_copies_and_states(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    loss = copy.deepcopy(loss)
    call(loss, batch)  # what calls leave behind, copies have too
    other = case.make()
    other.load_state_dict(loss.state_dict())
    expected = measure(loss, batch)
    for again in (pickle.loads(pickle.dumps(loss)), other):
        assert_same(measure(again, batch), expected)


ONE_GRAPH = (
    EnergyConfusionRegularizer,
    IntraClassRegularizer,
    JRDLoss,
    JRSRegularizer,  # and the joint regularizers that derive from it
    VarianceRegularizer,
)


def one_is_quick(names: Iterable[str], quick: str) -> pytest.MarkDecorator:
    """Compiling takes seconds: with `make test` it is done to one of them."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [name if name == quick else pytest.param(name, marks=slow) for name in names]
    )


@one_is_quick([name for name in one_per_class() if name != "several"], "EC")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled(name: str) -> None:
    """Energy confusion, the joint regularizers and the variance in one graph, all with equal results.

    (A sum with a schedule has its own test.)
    """
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case)
    whole = isinstance(loss, ONE_GRAPH)
    expected = measure(loss, batch)
    leaves = batch.map(lambda x: x.requires_grad_())
    value = call(torch.compile(loss, backend="eager", fullgraph=whole), leaves)
    inputs = dict(leaves.tensors()) | dict(loss.named_parameters())
    gradients = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    assert_agree({"value": value.detach(), **dict(zip(inputs, gradients, strict=True))}, expected)
    torch.compiler.reset()


# Modules that are no losses


def draw(name: str) -> Tensor:
    return torch.randn(6, *MODULES[name].shape)


def output(module: nn.Module, x: Tensor) -> Tensor:
    found = module(x)
    return torch.cat(found, dim=1) if isinstance(found, list) else found


def module_results(module: nn.Module, x: Tensor) -> Measured:
    module = copy.deepcopy(module)
    x = x.detach().clone().requires_grad_()
    found = output(module, x)
    inputs = {"x": x, **dict(module.named_parameters())}
    total = (found * torch.linspace(-1, 2, found.numel()).view_as(found)).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {"value": found.detach(), **dict(zip(inputs, gradients, strict=True))}


@each_module
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_modules_in_any_precision(name: str, dtype: torch.dtype) -> None:
    """Networks work in their own precision, moments and kernels in full; parameters keep theirs."""
    case = MODULES[name]
    module, x = case.make().to(dtype), draw(name).to(dtype)
    dtypes = {key: value.dtype for key, value in module.state_dict().items()}
    found = output(module, x)
    expected = output(copy.deepcopy(module).double(), x.double())
    assert found.dtype == (torch.float32 if case.raised and dtype in HALF else dtype)
    bound = BOUNDS[dtype if not case.raised else found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)
    assert {key: value.dtype for key, value in module.state_dict().items()} == dtypes


@each_module
def test_modules_under_autocast(name: str) -> None:
    case = MODULES[name]
    module, x = case.make(), draw(name)
    expected = output(module, x)
    dtypes = {key: value.dtype for key, value in module.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = output(module, x)
    if case.raised:
        assert torch.equal(found, expected)
    else:  # how close is torch's affair: it rounds every layer's input and weights
        assert found.shape == expected.shape and found.isfinite().all()
    assert {key: value.dtype for key, value in module.state_dict().items()} == dtypes


@each_module
def test_rows_of_modules_are_images(name: str) -> None:
    """The order of the batch is that of the results; a NaN stays in its own image, or, in pairs, shows."""
    case = MODULES[name]
    module, x = case.make().double(), draw(name).double()
    found, order = output(module, x), torch.randperm(len(x))
    again = output(module, x[order])
    right = found[order][:, order] if case.pairs else found[order]
    assert_agree({"value": again}, {"value": right})
    x.view(len(x), -1)[2, 1] = float("nan")
    odd = output(module, x)
    assert odd[2].isnan().any()
    if not case.pairs:
        others = torch.arange(len(x)) != 2
        assert_agree({"value": odd[others]}, {"value": found[others]})


@each_module
@pytest.mark.parametrize("rows", ROWS)
def test_modules_stay_finite(name: str, rows: str) -> None:
    x = ROWS[rows](draw(name))
    for magnitude in (1e-6, 1, 1e4):
        found = module_results(MODULES[name].make(), magnitude * x)
        for part, result in found.items():
            assert result is not None and result.isfinite().all(), (part, magnitude)


@each_module
def test_copies_and_states_of_modules(name: str) -> None:
    make, x = MODULES[name].make, draw(name)
    module, other = make(), make()
    other.load_state_dict(module.state_dict())
    with generators_untouched():
        expected = module_results(module, x)
    for again in (pickle.loads(pickle.dumps(module)), other):
        assert_same(module_results(again, x), expected)


@one_is_quick(MODULES, "VEM")
def test_compiled_modules(name: str) -> None:
    module, x = MODULES[name].make(), draw(name)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_agree({"value": output(compiled, x).detach()}, {"value": output(module, x).detach()})
    torch.compiler.reset()
