"""Random batches of every loss in several threads at once."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pml_regularizers import attach_all
from tests.library.contract import CLASSES, LOSSES, Batch, Case, Stages, call

DRAWN = "EC, drawn"  # its value depends on the calls so far


LABELS = st.lists(st.integers(0, CLASSES - 1), min_size=2, max_size=12).map(torch.tensor)


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
    several=st.lists(LABELS, min_size=8, max_size=8),
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
