"""Checks against float64."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import spawn
from torch.nn import functional as F

from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tools.gpu.networks import (
    BACKENDS,
    LOSSES,
    Sizes,
    behind,
    draw_inputs,
    loss_and_gradients,
    share_batch,
    small_network,
    value_and_gradients,
)
from tools.gpu.part import Part
from tools.gpu.retrieval import Retrieval
from tools.gpu.timing import matmul_precision

CPU = torch.device("cpu")

TRUNKS = ("resnet50", "googlenet")

FLOAT32, TF32 = 1e-4, 2**-8
"""Bounds of errors in float32. TF32 rounds to 10 bits; five factors and their sums come to 2^-10 (simulated)."""

HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Bounds of gradients that are rounded to half precision at the end, a few units in the last place."""

SMALL = {True: Sizes(8, 9, 16, 8, 32, 3, 4), False: Sizes(32, 49, 256, 128, 512, 5, 20)}
PAPER = {True: Sizes(2, 16, 16, 8, 64, 3, 4), False: Sizes(40, 64, 1024, 512, 8192, 5, 100)}
"""Sizes of the parts; True: tiny."""


def check_loss(part: Part, name: str) -> None:
    """A loss in three precisions."""
    sizes = SMALL[part.tiny]
    loss, inputs = LOSSES[name](sizes), draw_inputs(sizes)
    expected = value_and_gradients(loss, inputs, CPU, torch.float64)
    found = value_and_gradients(loss, inputs, part.device, torch.float32)
    part.check(f"{name}, float32", found, expected, FLOAT32)
    for half, bound in HALF.items():
        rounded = {key: x.to(half) for key, x in inputs.items()}
        expected = value_and_gradients(loss, rounded, CPU, torch.float64)
        # The largest gradient becomes 1024: float16 then has all digits of what is not far smaller.
        largest = max(gradient.abs().max().item() for gradient in expected[1:])
        scale = 2.0 ** (10 - round(torch.tensor(largest).log2().item()))
        found = value_and_gradients(loss, rounded, part.device, torch.float32, half, scale)
        words = str(half).removeprefix("torch.")
        part.check(f"{name}, {words}, value", found[0], expected[0], FLOAT32)
        part.check(f"{name}, {words}, gradients", found[1:], expected[1:], bound)


def summed(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Sums of products from features and floating matrices, and their gradients, in a precision."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    sums = function(*leaves)
    return [sums.detach(), *torch.autograd.grad(sums, leaves, gradient.to(dtype))]


def by_autograd(x: Tensor, *matrices: Tensor) -> Tensor:
    """Sums of products of projections by plain operations."""
    phi, sums = 1, []
    for W in matrices:
        phi = phi * (x @ W.to(x.dtype))
        sums.append(phi.sum(dim=1))
    return torch.stack(sums[1:])


def sketches_by_autograd(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """Sums of convolutions of sketches by plain operations."""
    d = len(tables[0])
    padded, phi, sums = F.pad(x, (1, 0)), 1, []  # channel 0 is for places without a channel
    for table in tables:
        places = table.flatten().long()
        sketch = (padded[..., places.abs()] * places.sign()).unflatten(2, (d, -1)).sum(dim=3)
        phi = phi * torch.fft.rfft(sketch)
        sums.append(torch.fft.irfft(phi.sum(dim=1), n=d))
    return torch.stack(sums[1:])


def draw_features(part: Part, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Features and the gradient of the sums, on the device."""
    x = torch.randn(sizes.N, sizes.P, sizes.C, device=part.device)
    return x, torch.randn(sizes.K - 1, sizes.N, sizes.d, device=part.device)


def draw_matrices(part: Part, sizes: Sizes) -> list[Tensor]:
    shape = sizes.K, sizes.C, sizes.d
    return list(torch.randn(shape, device=part.device) / sizes.C**0.5)


def draw_tables(part: Part, sizes: Sizes) -> list[Tensor]:
    shape = sizes.d, -(-sizes.C // sizes.d)
    tables = [torch.empty(shape, dtype=torch.int32, device=part.device) for _ in range(sizes.K)]
    for table in tables:
        convolutions.draw_table(table, sizes.C)
    return tables


def project(x: Tensor, *matrices: Tensor, checkpoint: bool = False) -> Tensor:
    return products.summed_products(x, matrices, checkpoint=checkpoint)


def check_moments(part: Part, kind: str) -> None:
    """HORDE's moments at the paper's size: "trained", "random" or "sketched"."""
    x, gradient = draw_features(part, sizes := PAPER[part.tiny])
    matrices = draw_matrices(part, sizes)
    inputs, plain, call = [x, *matrices], by_autograd, project
    if kind == "random":
        signs = [W.sign().to(torch.int8) for W in matrices]
        inputs, plain = [x], lambda x: by_autograd(x, *signs)
        call = lambda x, checkpoint: project(x, *signs, checkpoint=checkpoint)  # noqa: E731
    elif kind == "sketched":
        inputs = [x]
        tables = draw_tables(part, sizes)
        plain = partial(sketches_by_autograd, tables=tables)
        call = partial(convolutions.summed_convolutions, tables=tables)
    expected = summed(plain, inputs, gradient, torch.float64)
    for way, checkpoint in (("stored", False), ("recomputed", True)):
        run = partial(summed, partial(call, checkpoint=checkpoint), inputs, gradient, torch.float32)
        part.check(f"{kind} moments, float32, {way}", found := run(), expected, FLOAT32)
        if kind == "sketched":
            part.check(f"sketched moments, float32, {way}, a second call", run(), found, 0)
    if kind == "trained":
        with matmul_precision("high"):
            found = summed(project, inputs, gradient, torch.float32)
        part.check("trained moments, TF32", found, expected, TF32)


def check_trunk(part: Part, trunk: str) -> None:
    """The paper's HORDE, and VEM's gate, behind a whole network."""
    network, images = behind(trunk, part.tiny)
    expected = loss_and_gradients(network, images, part.device, torch.float64)
    found = loss_and_gradients(network, images, part.device, torch.float32)
    part.check(f"{trunk}, float32, loss", found[0], expected[0], FLOAT32)
    # Rounding lets a ReLU or a max pool pass another one of two nearly equal entries.
    part.check(f"{trunk}, float32, gradients", found[1:], expected[1:], 5e-2)
    half = loss_and_gradients(network, images, part.device, torch.float32, torch.bfloat16)
    part.check(f"{trunk}, bfloat16, loss", half[0], expected[0], 0.05)


def check_processes(part: Part, processes: Any, folder: str) -> None:
    network, images, labels = small_network(part.device)
    value = network(images, labels)
    value.backward()
    expected = [value.detach(), *(parameter.grad for parameter in network.parameters())]

    def compare(backend: str, name: str) -> None:
        found = torch.load(f"{folder}/{backend}.pt", map_location="cpu")
        part.check(name, found, expected, 1e-9)

    try:
        while not processes.join():
            pass
    finally:  # what one group has found stays, if the next fails
        for backend, count in BACKENDS[part.device.type].items():
            name = f"{backend}, {count} process{'es' * (count > 1)}"
            part.run(name, 0, partial(compare, backend, name))


def check_scaler(part: Part) -> None:
    network, images = behind("resnet50", part.tiny)
    expected, *_ = loss_and_gradients(network, images, part.device, torch.float64)
    network, images = network.to(part.device), images.to(part.device)
    labels = torch.arange(len(images), device=part.device) // 4
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    scaler = torch.amp.GradScaler(part.device.type, init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in parameters]

    def step() -> float:
        value: Tensor = network(images, labels, torch.float16)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return value.item()

    values = [step()]
    part.check("float16, loss", values[0], expected, 0.05)
    part.check("weights after a skipped step", parameters, before, 0)
    part.check("scale after a skipped step", scaler.get_scale(), 2.0**59, 0)
    scaler.update(1024.0)
    values += [step() for _ in range(1 if part.tiny else 20)]
    part.tell(f"Loss of the first step {values[0]:.4f}, of step {len(values)} {values[-1]:.4f}.")
    assert part.tiny or values[-1] < values[0], f"the loss rose to {values[-1]:.4g}"


def check_channels_last(part: Part) -> None:
    inputs = draw_inputs(sizes := SMALL[part.tiny])
    maps = inputs["feature_map"].contiguous(memory_format=torch.channels_last)
    for name in ("HORDE, cascaded", "HORDE, sketch"):
        loss = LOSSES[name](sizes)
        expected, found = (
            value_and_gradients(loss, inputs | {"feature_map": x}, part.device, torch.float32)
            for x in (inputs["feature_map"], maps)
        )
        part.check(f"{name}, channels_last", found, expected, FLOAT32)


def correctness(part: Part) -> None:
    """Losses, moments, ranks and processes against float64.

    Every loss with the gradients of its inputs and parameters: in float32, and under autocast on inputs in bfloat16
    and float16, whose gradients pass through a scale as a `GradScaler`'s; the float64 is the CPU's. HORDE's moments
    at the paper's size, and whole networks: against plain autograd in float64 on the GPU. TF32 is off, except where
    a line says TF32. Ranks: against sorted distances in float64. Two processes that share the GPU by gloo, and one
    with NCCL: against one process with the whole batch, all in float64.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Early, since importing takes seconds.
        processes = spawn(share_batch, (part.device.type, folder), nprocs=2, join=False)
        for name in LOSSES:
            part.run(name, 3, partial(check_loss, part, name))
        for kind in ("trained", "random", "sketched"):
            part.run(f"{kind} moments", 8, partial(check_moments, part, kind))
        part.run("ranks", 4, lambda: Retrieval(part, 3000, 64, 400, (1, 10, 50)).check(1e-6))
        for trunk in TRUNKS[: 1 if part.tiny else 2]:
            part.run(trunk, 8, partial(check_trunk, part, trunk))
        part.run("processes", 0, partial(check_processes, part, processes, folder))


def float16(part: Part) -> None:
    """float16 with a scaler, and channels_last.

    The loss of HORDE behind ResNet-50 in float16, against float64 on the GPU. A scale that makes gradients infinite
    must leave all weights as they are, and be halved; in later steps, at a scale of 1024, the loss must fall. Maps
    in channels_last must give HORDE the value and the gradients of contiguous ones.
    """
    part.run("float16 with a scaler", 8, partial(check_scaler, part))
    part.run("channels_last", 3, partial(check_channels_last, part))
