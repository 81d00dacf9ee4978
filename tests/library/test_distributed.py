"""Two and three processes give the loss and the gradients of one, for every kind of loss."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners

from pml_regularizers import DistributedLoss, prepare_loss
from tests.support import gradients
from tests.support.gradients import CACHED_CASES, CASES, PML_CASES
from tests.support.pool import Pool
from tests.support.unreduced import WRAPPERS, train_all

pytestmark = pytest.mark.filterwarnings("ignore:powers. . is even")  # of a trunk that ends in tanh


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {case: gradients.measure(case, None) for case in CASES}


@pytest.fixture(scope="module", params=[2, 3])
def spread(request: pytest.FixtureRequest, pool: Pool) -> tuple[int, dict[str, Any]]:
    found, *_ = pool.run(gradients.measure_all, processes=request.param)
    return request.param, found


@pytest.mark.parametrize("check", ["check_errors", "check_calls", "check_copies"])
def test_calls_of_three_processes(check: str, pool: Pool) -> None:
    pool.run(getattr(gradients, check), processes=3)


def test_one_process_takes_the_calls_of_the_loss_inside() -> None:
    embeddings, labels, others = torch.randn(6, 4), torch.arange(6) // 2, torch.randn(6, 4)
    loss, miner = losses.TripletMarginLoss(), miners.BatchHardMiner()
    mined = miner(embeddings, labels)
    ours, mining = DistributedLoss(loss), DistributedLoss(loss, miner)
    assert prepare_loss(ours) is ours
    assert ours(embeddings, indices_tuple=mined) == loss(embeddings, indices_tuple=mined)
    assert mining(embeddings, labels) == loss(embeddings, labels, mined)
    reference = {"ref_emb": others, "ref_labels": labels}
    assert ours(embeddings, labels, **reference) == loss(embeddings, labels, **reference)
    sums = DistributedLoss(losses.MultipleLosses([loss]))
    with pytest.raises(ValueError, match="ref_emb: MultipleLosses takes none"):
        sums(embeddings, labels, ref_emb=others)


@pytest.mark.parametrize(
    ("how", "case"),
    [*(("ours", case) for case in CASES), *(("cached", case) for case in CACHED_CASES)],
)
def test_equal_one_process(how: str, case: str, spread: Any, expected: dict[str, Any]) -> None:
    """At once, and in the chunks of a `GradientCache`."""
    found = spread[1][how][case]
    torch.testing.assert_close(found["loss"], expected[case]["loss"], rtol=1e-12, atol=0)
    assert_same_gradients(found["gradients"], expected[case]["gradients"])


@pytest.mark.parametrize("case", PML_CASES)
def test_under_pml_wrapper(case: str, spread: Any, expected: dict[str, Any]) -> None:
    """Network and projections are exact; the value and class weights are multiplied by the processes."""
    processes, everything = spread
    found = everything["pml"][case]
    right = processes * expected[case]["loss"]
    torch.testing.assert_close(found["loss"], right, rtol=1e-12, atol=0)
    exact = {
        name: processes * gradient if name.endswith(("W", "proxies")) else gradient
        for name, gradient in expected[case]["gradients"].items()
    }
    assert_same_gradients(found["gradients"], exact)


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


def assert_same_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert any(name.startswith("net.trunk") for name in found)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        bound = 1e-12 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=bound)
