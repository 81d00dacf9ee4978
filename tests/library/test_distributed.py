"""Two and three processes give the loss and the gradients of one, for every kind of loss."""

import copy
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners

from pml_regularizers import DistributedLoss, prepare_loss
from tests.support.gradients import (
    CASES,
    PML_CASES,
    check_calls,
    check_copies,
    check_errors,
    measure,
    measure_all,
)
from tests.support.pool import Pool
from tests.support.unreduced import WRAPPERS, train_all


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {case: measure(case, None) for case in CASES}


@pytest.fixture(scope="module", params=[2, 3])
def spread(request: pytest.FixtureRequest, pool: Pool) -> tuple[int, dict[str, Any]]:
    found, *_ = pool.run(measure_all, list(CASES), PML_CASES, processes=request.param)
    return request.param, found


@pytest.mark.parametrize("processes", [2, 3])
def test_what_every_process_refuses(pool: Pool, processes: int) -> None:
    pool.run(check_errors, processes=processes)


@pytest.mark.parametrize("processes", [2, 3])
def test_it_is_called_like_the_loss_inside(pool: Pool, processes: int) -> None:
    pool.run(check_calls, processes=processes)


@pytest.mark.parametrize("processes", [2, 3])
def test_copies_of_embeddings_and_no_embeddings(pool: Pool, processes: int) -> None:
    pool.run(check_copies, processes=processes)


def test_one_process_takes_the_calls_of_the_loss_inside() -> None:
    embeddings, labels = torch.randn(6, 4), torch.arange(6) // 2
    pairs = miners.BatchEasyHardMiner()(embeddings, labels)
    base, views = losses.ContrastiveLoss(), losses.SelfSupervisedLoss(losses.NTXentLoss())
    others, mask = torch.randn(6, 4), torch.arange(6) < 4
    assert DistributedLoss(base)(embeddings, indices_tuple=pairs) == base(
        embeddings, indices_tuple=pairs
    )
    reference = {"ref_emb": others, "ref_labels": labels}
    assert DistributedLoss(base)(embeddings, labels, **reference) == base(
        embeddings, labels, **reference
    )
    assert DistributedLoss(views)(embeddings, others) == views(embeddings, others)
    memory = losses.CrossBatchMemory(base, 4, memory_size=20)
    again = copy.deepcopy(memory)
    assert DistributedLoss(memory)(embeddings, labels, enqueue_mask=mask) == again(
        embeddings, labels, enqueue_mask=mask
    )


@pytest.mark.parametrize("case", CASES)
def test_equal_one_process(case: str, spread: Any, expected: dict[str, Any]) -> None:
    _, found = spread
    torch.testing.assert_close(
        found["ours"][case]["loss"], expected[case]["loss"], rtol=1e-12, atol=0
    )
    assert_same_gradients(found["ours"][case]["gradients"], expected[case]["gradients"])


@pytest.mark.parametrize("case", PML_CASES)
def test_under_pml_wrapper(case: str, spread: Any, expected: dict[str, Any]) -> None:
    """Network and projections are exact; the value and class weights are multiplied by the processes."""
    processes, everything = spread
    found = everything["pml"][case]
    torch.testing.assert_close(
        found["loss"], processes * expected[case]["loss"], rtol=1e-12, atol=0
    )
    gradients = {
        name: processes * gradient if name.endswith(("W", "proxies")) else gradient
        for name, gradient in expected[case]["gradients"].items()
    }
    assert_same_gradients(found["gradients"], gradients)


@pytest.fixture(scope="module")
def trained(pool: Pool) -> list[dict[str, Any]]:
    return pool.run(train_all, processes=3)


@pytest.mark.parametrize("how", WRAPPERS)
def test_own_parameters_that_nobody_averages(how: str, trained: list[dict[str, Any]]) -> None:
    """One warning at the first backward pass; an error if they differ from the start."""
    first, *others = runs = [process[how] for process in trained]
    if how == "nothing from the start":
        message = "loss: the 3 processes hold different parameters or buffers of HORDELoss"
        assert all(run["error"].startswith(message) for run in runs)
        return
    for run in runs:
        said, *later = run["warnings"]
        assert not any(later)
        if how in ("nothing", "by hand"):
            (message,) = said
            assert "DistributedLoss: nothing averages the gradients of HORDELoss's own" in message
            assert "criterion = prepare_loss(DistributedLoss(loss))" in message
        else:
            assert not said
        assert run["error"] is None and len(run["warnings"]) == 3
        if how != "nothing":
            assert torch.equal(run["parameters"], first["parameters"])
    if how == "nothing":
        assert not torch.equal(others[0]["parameters"], first["parameters"])
    elif how != "frozen":
        right = trained[0]["prepare_loss with an accelerator"]["gradient"]
        torch.testing.assert_close(first["gradient"], right)


def test_prepare_loss_with_one_process() -> None:
    loss = DistributedLoss(losses.ArcFaceLoss(3, 4))
    assert prepare_loss(loss) is loss


def assert_same_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert any(name.startswith("net.trunk") for name in found)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=1e-12 * gradient.abs().max().item()
        )


def test_one_process_calls_the_loss() -> None:
    embeddings, labels = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    miner = miners.BatchHardMiner()
    base = losses.TripletMarginLoss()
    mined = base(embeddings, labels, miner(embeddings, labels))
    assert DistributedLoss(base, miner)(embeddings, labels) == mined
    assert DistributedLoss(base)(embeddings, labels, miner(embeddings, labels)) == mined
    assert DistributedLoss(base)(embeddings, labels) == base(embeddings, labels) != mined
