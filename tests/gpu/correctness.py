"""Checks against float64."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pml_regularizers as ours
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tests.gpu.networks import (
    LOSSES,
    Processes,
    Sizes,
    behind,
    draw_inputs,
    loss_and_gradients,
    small_network,
    value_and_gradients,
)
from tests.gpu.part import Part
from tests.gpu.timing import matmul_precision

CPU = torch.device("cpu")

FLOAT32, TF32 = 1e-4, 2**-8
"""Bounds of errors in float32. TF32 rounds to 10 bits; five factors and their sums come to 2^-10 (simulated)."""

HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Bounds of gradients that are rounded to half precision at the end, a few units in the last place."""


def check_losses(part: Part) -> None:
    """All losses, each in three precisions; a loss with an error does not keep the others from their checks."""
    sizes = Sizes(8, 9, 16, 8, 32, 3, 4) if part.tiny else Sizes(32, 49, 256, 128, 512, 5, 20)
    for name, make in LOSSES.items():
        part.run(name, 3, partial(check_loss, part, name, make(sizes), draw_inputs(sizes)))


def check_loss(part: Part, name: str, loss: nn.Module, inputs: Mapping[str, Tensor]) -> None:
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


def paper_sizes(tiny: bool) -> Sizes:
    return Sizes(2, 16, 16, 8, 64, 3, 4) if tiny else Sizes(40, 64, 1024, 512, 8192, 5, 100)


def summed(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Sums of products from features and floating matrices, and their gradients, in a precision."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    sums = function(*leaves)
    return [sums.detach(), *torch.autograd.grad(sums, leaves, gradient.to(dtype))]


def by_autograd(x: Tensor, *matrices: Tensor) -> Tensor:
    """Sums of products of projections by plain operations."""
    phi, sums = x @ matrices[0], []
    for W in matrices[1:]:
        phi = phi * (x @ W)
        sums.append(phi.sum(dim=1))
    return torch.stack(sums)


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


def draw_matrices(part: Part, sizes: Sizes, fixed: bool) -> list[Tensor]:
    shape = sizes.K, sizes.C, sizes.d
    if fixed:
        return list(torch.randint(2, shape, device=part.device).mul_(2).sub_(1).to(torch.int8))
    return list(torch.randn(shape, device=part.device) / sizes.C**0.5)


def project(
    x: Tensor, *matrices: Tensor, checkpoint: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return products.summed_products(x, matrices, 2, dtype or x.dtype, checkpoint)


def trained_moments(part: Part, sizes: Sizes) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    x, gradient = draw_features(part, sizes)
    inputs = [x, *draw_matrices(part, sizes, fixed=False)]
    expected = summed(by_autograd, inputs, gradient, torch.float64)
    for title, checkpoint in (("stored", False), ("recomputed", True)):
        call = partial(project, checkpoint=checkpoint)
        yield title, summed(call, inputs, gradient, torch.float32), expected


def random_moments(part: Part, sizes: Sizes) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    x, gradient = draw_features(part, sizes)
    matrices = draw_matrices(part, sizes, fixed=True)

    def plain(x: Tensor) -> Tensor:
        return by_autograd(x, *(W.to(x.dtype) for W in matrices))

    expected = summed(plain, [x], gradient, torch.float64)
    found = summed(lambda x: project(x, *matrices), [x], gradient, torch.float32)
    yield "stored", found, expected


def sketched_moments(part: Part, sizes: Sizes) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    x, gradient = draw_features(part, sizes)
    tables = draw_tables(part, sizes)
    plain = partial(sketches_by_autograd, tables=tables)
    expected = summed(plain, [x], gradient, torch.float64)
    for title, checkpoint in (("stored", False), ("recomputed", True)):
        call = partial(convolutions.summed_convolutions, tables=tables, checkpoint=checkpoint)
        found = summed(call, [x], gradient, torch.float32)
        yield title, found, expected
        again = summed(call, [x], gradient, torch.float32)
        yield f"{title}, a second call", again, found


def draw_tables(part: Part, sizes: Sizes) -> list[Tensor]:
    shape = sizes.d, -(-sizes.C // sizes.d)
    tables = [torch.empty(shape, dtype=torch.int32, device=part.device) for _ in range(sizes.K)]
    for table in tables:
        convolutions.draw_table(table, sizes.C)
    return tables


MOMENTS = {
    "trained moments": trained_moments,
    "random moments": random_moments,
    "sketched moments": sketched_moments,
}


def check_moments(part: Part, name: str, cases: Callable[..., Iterator[Any]]) -> None:
    for title, found, expected in cases(part, paper_sizes(part.tiny)):
        bound = 0 if title.endswith("a second call") else FLOAT32
        part.check(f"{name}, float32, {title}", found, expected, bound)


def check_tf32(part: Part) -> None:
    x, gradient = draw_features(part, sizes := paper_sizes(part.tiny))
    inputs = [x, *draw_matrices(part, sizes, fixed=False)]
    expected = summed(by_autograd, inputs, gradient, torch.float64)
    with matmul_precision("high"):
        part.check(
            "trained moments, TF32",
            summed(project, inputs, gradient, torch.float32),
            expected,
            TF32,
        )


def check_ranks(part: Part) -> None:
    """Ranks of queries by sorted distances in float64."""
    n, width, classes = (60, 8, 12) if part.tiny else (3000, 64, 400)
    labels = torch.arange(n) % classes
    vectors = F.normalize(torch.randn(classes, width)[labels] + torch.randn(n, width))
    recalls = (1, 10, 50)
    names = [*(f"recall_at_{K}" for K in recalls), "mean_reciprocal_rank", "r_precision"]
    names += ["mean_average_precision_at_r"]
    calculator = ours.RankAccuracyCalculator(names, device=part.device, recall_at=recalls)
    found = calculator.get_accuracy(vectors.to(part.device), labels.to(part.device))
    expected = exact_accuracies(vectors.double(), labels, recalls)
    for name in names:
        part.check(name, found[name], expected[name], 1e-6)


def exact_accuracies(
    vectors: Tensor, labels: Tensor, recalls: Sequence[int], block: int = 1024
) -> dict[str, float]:
    """Accuracies of each vector among the others from all distances, in the vectors' precision, on their device."""
    n = len(labels)
    halves = vectors.square().sum(dim=1) / 2
    sums: dict[str, float] = {}
    for start in range(0, n, block):
        rows = torch.arange(start, min(start + block, n), device=vectors.device)
        distances = torch.addmm(halves, vectors[rows], vectors.T, alpha=-1)
        right = labels[rows, None] == labels
        own_place = rows - start, rows  # a vector is not ranked against itself
        right[own_place] = False
        distances[own_place] = torch.inf
        R = right.sum(dim=1)
        own = (
            distances.masked_fill(~right, torch.inf)
            .topk(int(R.max()), largest=False, sorted=True)
            .values
        )
        wrong = distances.masked_fill_(right, torch.inf)
        j = torch.arange(1, own.shape[1] + 1, device=vectors.device)
        nearer = [(wrong <= own[:, k, None]).sum(dim=1) for k in range(own.shape[1])]
        ranks = torch.stack(nearer, dim=1) + j
        ranks = ranks.double().masked_fill(own.isinf(), torch.inf)
        within = ranks <= R[:, None]
        values = {f"recall_at_{K}": ranks[:, 0] <= K for K in recalls}
        values["mean_reciprocal_rank"] = 1 / ranks[:, 0]
        values["r_precision"] = within.sum(dim=1) / R
        values["mean_average_precision_at_r"] = torch.where(within, j / ranks, 0).sum(dim=1) / R
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value.double().sum().item()
    return {name: value / n for name, value in sums.items()}


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


def check_processes(part: Part, processes: Processes) -> None:
    network, images, labels = small_network(part.device)
    value = network(images, labels)
    value.backward()
    expected = [value.detach(), *(parameter.grad for parameter in network.parameters())]
    try:
        processes.join(300 if part.tiny else max(part.seconds_left(), 10))
    finally:  # what one group has found stays, if the next hangs
        for backend, count in processes.groups:
            name = f"{backend}, {count} process{'es' * (count > 1)}"
            part.run(
                name,
                0,
                lambda b=backend, n=name: part.check(n, processes.results(b), expected, 1e-9),
            )


def check_compiled(part: Part) -> None:
    if part.tiny:  # minutes on one core; test-all compiles the losses on a CPU
        part.leave_out("torch.compile (tiny)")
        return
    if not (shutil.which("cc") or shutil.which("gcc")):
        part.leave_out("torch.compile (no C compiler)")
        return
    sizes = Sizes(32, 49, 256, 128, 512, 3, 20)
    loss, inputs = LOSSES["HORDE, sketch"](sizes), draw_inputs(sizes)
    inputs = {name: inputs[name] for name in ("embeddings", "feature_map")}
    expected = value_and_gradients(loss, inputs, CPU, torch.float64)
    compiled = torch.compile(loss.to(part.device))
    leaves = {name: x.to(part.device).requires_grad_() for name, x in inputs.items()}
    labels = torch.arange(sizes.N, device=part.device) // 4
    value = compiled(leaves["embeddings"], labels, features=leaves["feature_map"])
    found = [value.detach(), *torch.autograd.grad(value, list(leaves.values()))]
    part.check("HORDE, sketch, compiled, float32", found, expected, FLOAT32)


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
    values += [step() for _ in range(3 if part.tiny else 20)]
    part.tell(f"Loss of the first step {values[0]:.4f}, of step {len(values)} {values[-1]:.4f}.")
    assert values[-1] < values[0], f"the loss rose from {values[0]:.4g} to {values[-1]:.4g}"


def check_channels_last(part: Part) -> None:
    sizes = Sizes(8, 9, 16, 8, 32, 3, 4) if part.tiny else Sizes(32, 49, 256, 128, 512, 5, 20)
    inputs = draw_inputs(sizes)
    maps = inputs["feature_map"].contiguous(memory_format=torch.channels_last)
    for name in ("HORDE, cascaded", "HORDE, sketch"):
        loss = LOSSES[name](sizes)
        expected, found = (
            value_and_gradients(loss, inputs | {"feature_map": x}, part.device, torch.float32)
            for x in (inputs["feature_map"], maps)
        )
        part.check(f"{name}, channels_last", found, expected, FLOAT32)
