"""Contract of every public loss and module, in any precision, state, batch and PML slot."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, reducers, regularizers
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn

import pml_regularizers
from pml_regularizers import FeatureLoss, JRDLoss, MissingFeaturesError
from tests.library.contract import CLASSES, LABELS, LOSSES, MODULES, Batch, Case, call, feed
from tests.support.tolerances import BOUNDS, assert_close

pytestmark = pytest.mark.filterwarnings("ignore:powers. .* even and cannot tell opposite features")

HALF = (torch.float16, torch.bfloat16)
BASES = {"FeatureLoss", "ReproducingKernel"}

MADE = {name: case.make() for name, case in LOSSES.items()}  # to choose by; tests make their own


def those(holds: Callable[[Any], bool]) -> pytest.MarkDecorator:
    """The cases whose loss is such."""
    return pytest.mark.parametrize("name", [name for name, loss in MADE.items() if holds(loss)])


def one_per_class() -> list[str]:
    """The first case of each class of losses."""
    return list({type(loss): name for name, loss in reversed(MADE.items())}.values())


@pytest.fixture
def case(name: str) -> Case:
    return LOSSES[name]


@pytest.fixture
def loss(case: Case) -> nn.Module:
    return case.make()


@pytest.fixture
def batch(case: Case) -> Batch:
    return Batch.draw(case)


each_loss = pytest.mark.parametrize("name", LOSSES)
each_pml_class = pytest.mark.parametrize(
    "name", [name for name in one_per_class() if isinstance(MADE[name], BaseMetricLossFunction)]
)
reads_features = pytest.mark.parametrize("name", [n for n, case in LOSSES.items() if case.features])


def test_every_public_class_is_held_to_the_contract() -> None:
    public = {
        name
        for name in pml_regularizers.__all__
        if inspect.isclass(found := getattr(pml_regularizers, name))
        and issubclass(found, nn.Module)
    }
    theirs = {"MultipleLosses"}  # PML's, made of ours
    modules = [case.make() for case in MODULES.values()]
    assert {type(made).__name__ for made in [*MADE.values(), *modules]} == public - BASES | theirs
    held = len(one_per_class()) + len({type(made) for made in modules})
    assert held == len(public - BASES | theirs)


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


@each_loss
def test_values_equal_the_oracles(case: Case) -> None:
    """A regular batch, one of two images, and one with a single image in each class."""
    for labels in (LABELS, torch.tensor([3, 0]), torch.tensor([3, 0, 2, 1])):
        loss, batch = case.make().double(), Batch.draw(case, labels).to(torch.float64)
        value, expected = call(loss, batch), case.exact(loss, batch)
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
                values.append(call(loss, batch).item())
                x -= sign * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        bound = 1e-6 * (found[part].norm() * direction.norm()).item()
        assert slope == pytest.approx((found[part] * direction).sum().item(), rel=0, abs=bound), (
            part
        )


@each_loss
def test_inputs_of_any_precision(case: Case, loss: nn.Module) -> None:
    """With and without autocast, to the bit."""
    for dtype in (*HALF, torch.float32, torch.float64):
        batch = Batch.draw(case).to(dtype)
        found, expected = measure(loss, batch), exact(loss, batch)
        assert found["value"].dtype in (torch.float32, torch.float64)
        for part in dict(batch.tensors()):
            assert found[part] is None or found[part].dtype == dtype
        check_gradients_arrive(case, found)
        for part, result in found.items():  # zeros would always agree
            assert result is None or result.abs().max() > 0, part
        assert_same(measure(loss, batch, autocast=True), found)
        # The parameters are of float32, and so is what they take part in.
        lowered = {
            part: x.float() if x is not None and x.dtype == torch.float64 else x
            for part, x in found.items()
        }
        assert_agree(lowered, expected)


@each_loss
def test_parameters_keep_their_precision(case: Case, loss: nn.Module) -> None:
    for own in (torch.float32, torch.bfloat16):
        before = loss.to(own).state_dict()
        for dtype in (*HALF, torch.float32, torch.float64):
            with torch.autocast("cpu", torch.bfloat16):
                call(loss, Batch.draw(case).to(dtype))
        for key, value in loss.state_dict().items():
            assert (value.dtype, value.data_ptr()) == (before[key].dtype, before[key].data_ptr())


REDUCERS: dict[str, Callable[[], Any]] = {
    "AvgNonZeroReducer": reducers.AvgNonZeroReducer,
    "ClassWeightedReducer": lambda: reducers.ClassWeightedReducer(torch.linspace(1, 2, CLASSES)),
    "DivisorReducer": reducers.DivisorReducer,
    "PerAnchorReducer": reducers.PerAnchorReducer,
    "SumReducer": reducers.SumReducer,
}


@each_pml_class
def test_every_reducer(case: Case) -> None:
    """Applied to each part of the loss; without effect where there is nothing to reduce, and 0 for no image."""
    if not case.reducer:
        with pytest.raises(ValueError, match=r"reducer: .* has its own; pass it there"):
            case.make(reducer=reducers.SumReducer())
        return
    bare, unreduced = case.make(), case.make(reducer=reducers.DoNothingReducer())
    unreduced.load_state_dict(bare.state_dict())
    empty, batch = Batch.draw(case, LABELS[:0]), Batch.draw(case).map(lambda x: x.requires_grad_())
    parts: Any = call(unreduced, batch)
    assert parts.keys() == set(bare.sub_loss_names())
    for reducer, make in REDUCERS.items():
        if reducer == "ClassWeightedReducer" and "attention" in case.features:
            with pytest.raises(ValueError, match="reducer: ClassWeightedReducer looks labels up"):
                case.make(reducer=make())
            continue
        loss = case.make(reducer=make())
        loss.load_state_dict(bare.state_dict())
        value = call(loss, batch)
        expected = sum(
            make()({part: info}, batch.embeddings, LABELS) for part, info in parts.items()
        )
        torch.testing.assert_close(value, expected)
        if all(info["reduction_type"] == "already_reduced" for info in parts.values()):
            assert torch.equal(value, call(bare, batch))
        value.backward()
        assert not any(x.any() for x in measure(loss, empty).values() if x is not None)


@each_pml_class
def test_statistics_change_nothing_and_are_plain_values(name: str) -> None:
    case = LOSSES[name]
    silent, counting = case.make(collect_stats=False), case.make(collect_stats=True)
    counting.load_state_dict(silent.state_dict())
    batch = Batch.draw(case)
    assert_same(measure(counting, batch), measure(silent, batch))

    def recorded(kind: str) -> dict[str, Any]:
        return {
            f"{type(module).__name__}.{name}": getattr(module, name)
            for module in counting.modules()
            for name in getattr(module, kind, [])
        }

    settings = recorded("_record_these")
    call(counting, batch)
    call(silent, batch)
    assert recorded("_record_these") == settings
    records = settings | recorded("_record_these_stats")
    assert records
    for record, value in records.items():
        assert isinstance(value, (int, float, str, list, type(None))), record
    counted = {name for name in vars(counting).keys() - vars(silent).keys() if name[0] != "_"}
    assert counted <= {record.partition(".")[2] for record in records}


@each_pml_class
def test_an_embedding_regularizer_is_added(case: Case, batch: Batch) -> None:
    regularizer = regularizers.LpRegularizer()
    bare = case.make()
    loss = case.make(embedding_regularizer=regularizer, embedding_reg_weight=0.5)
    loss.load_state_dict(bare.state_dict())
    torch.testing.assert_close(
        call(loss, batch), call(bare, batch) + 0.5 * regularizer(batch.embeddings)
    )


@each_loss
def test_mined_tuples(case: Case, loss: nn.Module, batch: Batch) -> None:
    """Some of them make another value where the equation has tuples, and the same where it has none."""
    expected = measure(loss, batch)
    for mine in (lmu.get_all_pairs_indices, lmu.get_all_triplets_indices):
        found = measure(loss, batch, tuple(index[:5] for index in mine(LABELS)))
        if not case.tuples:
            assert_same(found, expected)
            continue
        assert all(x is None or x.isfinite().all() for x in found.values())
        assert not torch.isclose(found["value"], expected["value"])
        check_gradients_arrive(case, found)


@each_pml_class
def test_without_labels(case: Case, loss: nn.Module, batch: Batch) -> None:
    other = Batch(batch.embeddings, None, batch.features)
    if case.labels:
        with pytest.raises(ValueError, match="labels"):
            call(loss, other)
    else:
        assert torch.equal(call(loss, other), call(loss, batch))


@those(lambda loss: isinstance(loss, FeatureLoss) and not loss.takes_reference)
def test_reference_sets_are_refused_since_features_are_of_one_batch(
    loss: nn.Module, batch: Batch
) -> None:
    with pytest.raises(ValueError, match="ref_emb: "):
        loss(batch.embeddings, batch.labels, ref_emb=batch.embeddings, ref_labels=LABELS)


@reads_features
def test_missing_features(loss: nn.Module, batch: Batch) -> None:
    with pytest.raises(MissingFeaturesError):
        loss(batch.embeddings, batch.labels)
    fewer = batch.map(lambda x: x[:-1]).features
    with pytest.raises(ValueError, match=r"feature"):
        call(loss, Batch(batch.embeddings, batch.labels, fewer))


@those(lambda loss: isinstance(loss, FeatureLoss) and loss.feature_names)
def test_features_from_a_tap_are_those_that_are_passed(loss: nn.Module, batch: Batch) -> None:
    feed(loss, batch)
    assert torch.equal(loss(batch.embeddings, batch.labels), call(loss, batch))


@those(lambda loss: isinstance(loss, regularizers.BaseRegularizer))
def test_the_slot_of_embedding_regularizers(loss: nn.Module, batch: Batch) -> None:
    """Passes no labels: what needs them says where it goes instead."""
    outer = losses.ContrastiveLoss(embedding_regularizer=loss, embedding_reg_weight=0.5)
    feed(loss, batch)
    if loss.compares_classes:
        with pytest.raises(ValueError, match=r"labels: .* MultipleLosses"):
            outer(batch.embeddings, batch.labels)
    else:
        bare = losses.ContrastiveLoss()(batch.embeddings, batch.labels)
        expected = bare + 0.5 * call(loss, batch)
        feed(loss, batch)
        torch.testing.assert_close(outer(batch.embeddings, batch.labels), expected)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "identical": lambda x: x[:1].expand_as(x),
    "duplicated": lambda x: x[torch.arange(len(x)) // 2],
    "zero": torch.zeros_like,
    "first is zero": lambda x: torch.cat([torch.zeros_like(x[:1]), x[1:]]),
}
BATCHES = {
    "regular": (LABELS, ["identical", "duplicated", "zero", "first is zero"]),
    "two classes": (torch.tensor([3, 0]), ["random", "identical"]),
    "two of a class": (torch.tensor([1, 1]), ["random", "identical"]),
    "singletons": (torch.tensor([3, 0, 2, 1]), ["random"]),
    "one image": (torch.tensor([1]), ["random", "zero"]),
}


@each_loss
def test_degenerate_batches(case: Case, loss: nn.Module) -> None:
    """Finite, with gradients everywhere, and right: as in float64."""
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
def test_an_empty_batch(case: Case) -> None:
    """Nothing is lost: 0, with a gradient of 0 for every parameter, as in a process that got no image."""
    found = measure(case.make(), Batch.draw(case, LABELS[:0]))
    assert found["value"] == 0
    check_gradients_arrive(case, found)
    assert not any(x.any() for x in found.values() if x is not None)


@each_loss
def test_magnitudes(case: Case, loss: nn.Module) -> None:
    for magnitude in (1e-6, 1e4):
        batch = Batch.draw(case).map(lambda x, by=magnitude: by * x)
        found = measure(loss, batch)
        check_gradients_arrive(case, found)
        assert_agree(found, exact(loss, batch))


PROXIES = (losses.ArcFaceLoss, losses.ProxyAnchorLoss)


@those(lambda loss: not any(isinstance(part, PROXIES) for part in loss.modules()))
def test_names_and_integer_types_of_classes_do_not_matter(loss: nn.Module, batch: Batch) -> None:
    """Names count where a loss has weights of its own for each class; PML's proxies need int64."""
    names = torch.tensor([0, 1, 2, 3] if isinstance(loss, JRDLoss) else [3, 7, 50, 100])
    other = Batch(batch.embeddings, names[batch.labels].to(torch.int32), batch.features)
    assert_same(measure(loss, other), measure(loss, batch))


@each_loss
def test_nan_shows(case: Case, loss: nn.Module, batch: Batch) -> None:
    """One number that is none, anywhere in what the value depends on, spoils it."""
    for part, x in batch.tensors():
        if part == "embeddings" and not case.embeddings:
            continue
        kept = x.flatten()[4].clone()
        x.view(-1)[4] = float("nan")
        assert call(loss, batch).isnan(), part
        x.view(-1)[4] = kept
    assert call(loss, batch).isfinite()


@each_loss
def test_copies_and_states(case: Case, loss: nn.Module, batch: Batch) -> None:
    loss = copy.deepcopy(loss)
    call(loss, batch)  # what calls leave behind, copies have too
    other = case.make()
    other.load_state_dict(loss.state_dict())
    before = torch.get_rng_state()
    expected = measure(loss, batch)
    assert torch.equal(torch.get_rng_state(), before)  # no call draws numbers
    for again in (pickle.loads(pickle.dumps(loss)), other):
        assert_same(measure(again, batch), expected)
