"""Random calls of every loss: degenerate batches, and several threads at once."""

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pml_regularizers import attach_all
from tests.library.contract import CLASSES, LOSSES, Batch, Case, Stages, call

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "identical": lambda x: x[:1].expand_as(x),
    "duplicated": lambda x: x[torch.arange(len(x)) // 2],
    "zero": torch.zeros_like,
    "one zero": lambda x: torch.cat([torch.zeros_like(x[:1]), x[1:]]),
    "one far away": lambda x: torch.cat([1e3 * x[:1], x[1:]]),
}
# Without float16, which cannot hold the gradient of a row near zero.
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
DRAWN = "EC, drawn"  # its value depends on the calls so far


def labels(least: int, most: int) -> st.SearchStrategy[Tensor]:
    lists = st.lists(st.integers(0, CLASSES - 1), min_size=least, max_size=most)
    return lists.map(lambda found: torch.tensor(found, dtype=torch.long))


@given(
    name=st.sampled_from(list(LOSSES)),
    change=st.sampled_from(list(CHANGES)),
    labels=labels(0, 8),
    scale=st.sampled_from([1.0, 1e-6, 1e-3, 30.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_degenerate_batches(
    name: str, change: str, labels: Tensor, scale: float, dtype: torch.dtype
) -> None:
    """Finite values and gradients, whatever comes; 0 of nothing."""
    loss = LOSSES[name].make()
    batch = Batch.draw(LOSSES[name], labels)
    batch = batch.map(lambda x: CHANGES[change](scale * x).to(dtype).detach().requires_grad_())
    value = call(loss, batch)
    inputs = [x for _, x in batch.tensors()] + list(loss.parameters())
    gradients = torch.autograd.grad(value, inputs, allow_unused=True)
    assert value.isfinite() and (len(labels) or value == 0)
    assert all(g is None or g.isfinite().all() for g in gradients)


def result(case: Case, loss: nn.Module, stages: Stages | None, batch: Batch) -> list[Tensor | None]:
    """The value and the gradients of one call."""
    batch = batch.map(lambda x: x.detach().requires_grad_())
    if stages is None:
        value = call(loss, batch)
    else:
        stages(batch.features)
        value = loss(batch.embeddings, batch.labels)
    inputs = [x for _, x in batch.tensors()] + list(loss.parameters())
    return [value.detach(), *torch.autograd.grad(value, inputs, allow_unused=True)]


@given(
    name=st.sampled_from([name for name in LOSSES if name != DRAWN]),
    several=st.lists(labels(2, 12), min_size=8, max_size=8),
)
def test_one_loss_in_several_threads(name: str, several: list[Tensor]) -> None:
    """Several threads get the result of one thread at the same time, to the bit."""
    case, loss = LOSSES[name], LOSSES[name].make().eval()
    batches = [Batch.draw(case, labels) for labels in several]
    stages = Stages() if case.features else None
    if stages is not None:
        attach_all(loss, stages)
    expected = [result(case, copy.deepcopy(loss), None, batch) for batch in batches]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda batch: result(case, loss, stages, batch), 2 * batches))
    finally:
        sys.setswitchinterval(interval)
    for one, right in zip(found, 2 * expected, strict=True):
        for x, y in zip(one, right, strict=True):
            assert x is y or (x is not None and y is not None and torch.equal(x, y))
