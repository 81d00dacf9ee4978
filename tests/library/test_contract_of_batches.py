"""Contract of every public loss, in any batch, with any tuples, labels and features, and in any state."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning import losses, regularizers
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn

from pml_regularizers import FeatureLoss, JRDLoss, MissingFeaturesError
from pml_regularizers.features.feature_loss import LabelAwareRegularizer
from tests.library.contract import LABELS, Batch, Case, call, feed
from tests.library.test_contract import (
    assert_agree,
    assert_same,
    check_gradients_arrive,
    each_loss,
    each_pml_class,
    exact,
    measure,
    reads_features,
    takes_int64_only,
    those,
)

# Tuples, labels, reference sets, features


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


@those(lambda loss: isinstance(loss, FeatureLoss))
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
    if isinstance(loss, LabelAwareRegularizer):
        with pytest.raises(ValueError, match=r"labels: .* MultipleLosses"):
            outer(batch.embeddings, batch.labels)
    else:
        bare = losses.ContrastiveLoss()(batch.embeddings, batch.labels)
        expected = bare + 0.5 * call(loss, batch)
        feed(loss, batch)
        torch.testing.assert_close(outer(batch.embeddings, batch.labels), expected)


# Batches


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
@pytest.mark.parametrize("magnitude", [1e-6, 1e4])
def test_magnitudes(case: Case, loss: nn.Module, magnitude: float) -> None:
    batch = Batch.draw(case).map(lambda x: magnitude * x)
    found = measure(loss, batch)
    check_gradients_arrive(case, found)
    assert_agree(found, exact(loss, batch))


@each_loss
def test_the_order_of_the_batch_does_not_matter(case: Case) -> None:
    loss = case.make().double()
    batch = Batch.draw(case).to(torch.float64)
    order = torch.randperm(len(LABELS))
    expected = measure(loss, batch)
    for part, _ in batch.tensors():
        gradient = expected[part]
        expected[part] = None if gradient is None else gradient[order]
    assert_agree(measure(loss, batch.take(order)), expected)


@those(lambda loss: not takes_int64_only(loss))
def test_names_and_integer_types_of_classes_do_not_matter(loss: nn.Module, batch: Batch) -> None:
    """Names count where a loss has weights of its own for each class."""
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


# State


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
