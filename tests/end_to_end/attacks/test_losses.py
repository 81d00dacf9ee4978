"""Random calls of every loss: degenerate batches, and several threads at once."""

import copy
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
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


def degenerate_calls(seed: int, count: int) -> Iterator[tuple[str, str, Batch]]:
    """Names of losses, descriptions, and batches of 0 to 8 images, few classes, odd rows and sizes."""
    draw = random.Random(seed)
    for _ in range(count):
        name, change = draw.choice(list(LOSSES)), draw.choice(list(CHANGES))
        labels = [draw.randrange(draw.randint(1, CLASSES)) for _ in range(draw.randint(0, 8))]
        scale, dtype = draw.choice([1e-6, 1e-3, 1.0, 30.0]), draw.choice(DTYPES)
        torch.manual_seed(draw.getrandbits(32))
        batch = Batch.draw(LOSSES[name], torch.tensor(labels, dtype=torch.long))
        batch = batch.map(lambda x, c=change, s=scale, d=dtype: CHANGES[c](s * x).to(d))  # type: ignore[misc]
        yield name, f"{change} rows of {scale} in {dtype}, labels {labels}", batch


def test_degenerate_batches(request: pytest.FixtureRequest) -> None:
    """Finite values and gradients, whatever comes; 0 of nothing."""
    for name, what, drawn in degenerate_calls(0, request.config.getoption("--attacks")):
        loss = LOSSES[name].make()
        batch = drawn.map(lambda x: x.detach().requires_grad_())
        value = call(loss, batch)
        inputs = [x for _, x in batch.tensors()] + list(loss.parameters())
        gradients = torch.autograd.grad(value, inputs, allow_unused=True)
        assert value.isfinite() and (len(batch.labels) or value == 0), (name, what)
        assert all(g is None or g.isfinite().all() for g in gradients), (name, what)


def simultaneous_calls(seed: int, count: int) -> Iterator[tuple[str, nn.Module, list[Batch]]]:
    """Names of losses, the losses, and what several threads call each of them with at the same time."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice([name for name in LOSSES if name != DRAWN])
        torch.manual_seed(draw.getrandbits(32))
        case = LOSSES[name]
        sizes = [draw.randint(2, 12) for _ in range(8)]
        batches = [
            Batch.draw(case, torch.tensor([draw.randrange(CLASSES) for _ in range(size)]))
            for size in sizes
        ]
        yield name, case.make().eval(), batches


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


def test_one_loss_in_several_threads(request: pytest.FixtureRequest) -> None:
    """Several threads get the result of one thread at the same time, to the bit."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for name, loss, batches in simultaneous_calls(0, request.config.getoption("--attacks")):
            case = LOSSES[name]
            stages = Stages() if case.features else None
            if stages is not None:
                attach_all(loss, stages)

            def once(batch: Batch, of=(case, loss, stages)) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
                return result(*of, batch)

            expected = [result(case, copy.deepcopy(loss), None, batch) for batch in batches]
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(once, 2 * batches))
            for one, right in zip(found, 2 * expected, strict=True):
                assert all(
                    x is y or (x is not None and y is not None and torch.equal(x, y))
                    for x, y in zip(one, right, strict=True)
                ), name
    finally:
        sys.setswitchinterval(interval)
