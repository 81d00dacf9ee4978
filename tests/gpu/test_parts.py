"""The parts of `make gpu`, in the order in which they run; without a GPU, the same at tiny sizes.

The first line of a part's docstring is its title on the page docs/gpu.md, the others are its text there. `@limit`
has its seconds on a machine with one H100.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.reporting import Table
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tests.gpu import floors
from tests.gpu.networks import (
    LOSSES,
    Network,
    Processes,
    Sizes,
    behind,
    draw_inputs,
    horde,
    loss_and_gradients,
    make_trunk,
    small_network,
    value_and_gradients,
)
from tests.gpu.part import Part
from tests.gpu.timing import (
    Rates,
    alternate,
    extra_seconds,
    host_seconds,
    measure_rates,
    median,
    peak_megabytes,
    profile,
    ratios,
    seconds_of,
    wait,
)

Function = TypeVar("Function", bound=Callable[..., None])

CPU = torch.device("cpu")

FLOAT32, TF32 = 1e-4, 2**-7
"""Bounds of errors in float32. TF32 rounds to 10 bits; up to five factors and sums of them multiply the error."""

HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Bounds of gradients that are rounded to half precision at the end, a few units in the last place."""

TRUNKS = ("resnet50", "googlenet")

PROFILE = "GPU_PROFILE"
"""Environment variable: the file for the ten most expensive operations of a step."""


def limit(seconds: float) -> Callable[[Function], Function]:
    """Give a part its seconds."""

    def set_limit(part: Function) -> Function:
        part.seconds = seconds  # type: ignore[attr-defined]
        return part

    return set_limit


@contextmanager
def training_settings() -> Iterator[None]:
    """Those of a training that shall be fast: products in TF32, and cuDNN's search for the fastest convolutions."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with matmul_precision("high"):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """torch's precision of matrix products in float32: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------------------------------ correctness


@limit(60)
def test_correctness(part: Part) -> None:
    """Losses, moments, ranks and processes against float64.

    Every loss with the gradients of its inputs and parameters: in float32, and under autocast on inputs in bfloat16
    and float16, whose gradients pass through a scale as a `GradScaler`'s; the float64 is the CPU's. HORDE's moments
    at the paper's size, and whole networks: against plain autograd in float64 on the GPU. TF32 is off, except where
    a line says TF32. Ranks: against sorted distances in float64. Two processes that share the GPU by gloo, and one
    with NCCL: against one process with the whole batch, all in float64.
    """
    with tempfile.TemporaryDirectory() as folder:
        started: list[Processes] = []
        part.run(
            "start of processes", 20, lambda: started.append(Processes(part.device.type, folder))
        )
        part.run("losses", 15, partial(check_losses, part))
        for name, check in MOMENTS.items():
            part.run(name, 8, partial(check_moments, part, name, check))
        part.run("moments in TF32", 4, partial(check_tf32, part))
        part.run("ranks", 4, partial(check_ranks, part))
        for trunk in TRUNKS[: 1 if part.tiny else 2]:
            part.run(trunk, 8, partial(check_trunk, part, trunk))
        for processes in started:
            part.run("processes", 0, partial(check_processes, part, processes))
        part.run("torch.compile", 20, partial(check_compiled, part))


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
    part.check(f"{trunk}, float32, gradients", found[1:], expected[1:], 1e-2)
    half = loss_and_gradients(network, images, part.device, torch.float32, torch.bfloat16)
    part.check(f"{trunk}, bfloat16, loss", half[0], expected[0], 0.05)


def check_processes(part: Part, processes: Processes) -> None:
    network, images, labels = small_network(part.device)
    value = network(images, labels)
    value.backward()
    expected = [value.detach(), *(parameter.grad for parameter in network.parameters())]
    try:
        processes.join(60 if part.tiny else max(part.seconds_left(), 10))
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


# ------------------------------------------------------------------------------------------ steps


METHODS: Mapping[str, tuple[Callable[[Sizes], nn.Module], Callable[[Sizes], floors.Work]]] = {
    "HORDE, sketch (default)": (
        lambda s: horde(default_order(s)),
        lambda s: floors.sketched(default_order(s)),
    ),
    "HORDE, random": (
        lambda s: horde(s, projections="random"),
        lambda s: floors.projected(s, trained=False),
    ),
    "HORDE, cascaded": (
        lambda s: horde(s, projections="cascaded"),
        lambda s: floors.projected(s, trained=True),
    ),
    'HORDE, cascaded, matmul_dtype="bfloat16"': (
        lambda s: horde(s, projections="cascaded", matmul_dtype="bfloat16"),
        lambda s: floors.projected(s, trained=True, half=True),
    ),
    "JRD instead": (lambda s: ours.JRDLoss(s.classes, s.E), floors.joint),
    "energy confusion": (
        lambda s: beside(ours.EnergyConfusionRegularizer()),
        floors.energy_confusion,
    ),
    "VEM": (lambda s: beside(ours.VarianceRegularizer()), floors.variance),
}
"""Losses in place of binomial deviance, which they contain, except for JRD; and the work that they add."""

ALONE = "binomial deviance alone"


def default_order(sizes: Sizes) -> Sizes:
    """With the order and the width of HORDELoss's defaults."""
    return Sizes(**{**vars(sizes), "K": 3, "d": min(sizes.d, 1024)})


def beside(regularizer: nn.Module) -> nn.Module:
    from pytorch_metric_learning.losses import MultipleLosses

    return MultipleLosses([ours.BinomialDevianceLoss(), regularizer])


class Steps:
    """Training steps behind one trunk on one batch, by method: autocast to bfloat16, channels_last, fused Adam."""

    def __init__(self, part: Part, trunk: str, images: int) -> None:
        self.device = device = part.device
        side, N = (32, 4) if part.tiny else (256, images)
        self.trunk = make_trunk(trunk, part.tiny).to(device, memory_format=torch.channels_last)
        batch = torch.randn(N, 3, side, side, device=device)
        self.images = batch.contiguous(memory_format=torch.channels_last)
        self.labels = torch.arange(N, device=device) // 4
        with torch.no_grad():
            self.features = self.trunk_output(self.images).detach()
        P = self.features[0, 0].numel()
        C, (E, d, K) = self.trunk.num_features, (8, 64, 3) if part.tiny else (512, 8192, 5)
        self.sizes = Sizes(N, P, C, E, d, K, 100)
        losses = {ALONE: ours.BinomialDevianceLoss()}
        losses |= {name: make(self.sizes) for name, (make, _) in METHODS.items()}
        self.networks = {name: self.network(name, loss) for name, loss in losses.items()}
        self.optimizers = {
            name: torch.optim.Adam(network.parameters(), lr=1e-6, fused=True)
            for name, network in self.networks.items()
        }

    def trunk_output(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            output: Tensor = self.trunk(images)
        return output

    def network(self, name: str, loss: nn.Module) -> Network:
        network = Network(self.trunk, self.sizes.C, self.sizes.E, loss, vem=name == "VEM")
        return network.to(self.device)

    def step(self, name: str) -> None:
        """A whole training step."""
        self.networks[name](self.images, self.labels, torch.bfloat16).backward()
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def loss_alone(self, name: str) -> None:
        """Head and loss, forward and backward, on kept outputs of the trunk."""
        network = self.networks[name]
        features = self.features.detach().requires_grad_()
        with torch.autocast(self.device.type, torch.bfloat16):
            embeddings = network.head(features)
        network.loss(embeddings, self.labels).backward()
        network.zero_grad()


@limit(90)
def test_steps(part: Part) -> None:
    """Whole training steps with each method.

    A step is the forward and backward pass of ResNet-50 or GoogLeNet at 256 px, a head of 512 and a loss, and fused
    Adam, under autocast to bfloat16, in channels_last; products in float32 run in TF32. HORDE's default are
    sketches of orders 2 and 3 with d = 1024; random and cascaded ones have the paper's K = 5 and d = 8192. Extra is
    what a step takes longer than with binomial deviance alone. The floor is the time that its added matrix products
    and passes over memory take at the rates of this card, which the first table gives; `tests/gpu/floors.py` counts
    them. Launches of kernels are not in the floor: what adds next to no work still has to launch, and the
    loss-alone table shows how much of this the host does. Memory is the growth of the peak of torch's allocator in
    a step.
    """
    rates: list[Rates] = []
    part.run("rates of the card", 3, lambda: rates.append(tell_rates(part)))
    with training_settings():
        for images, seconds in ((40, 14), (112, 18))[: 1 if part.tiny else 2]:
            for trunk in TRUNKS[: 1 if part.tiny else 2]:
                measure = partial(measure_steps, part, trunk, images, seconds, rates)
                part.run(f"{trunk}, {images} images", seconds, measure)
        part.run("block sizes", 8, partial(measure_blocks, part))
        part.run("the loss alone", 12, partial(measure_losses_alone, part))
        part.run("torch.compile of the loss", 15, partial(measure_compiled, part))


def tell_rates(part: Part) -> Rates:
    rates = measure_rates(part.tiny, part.device)
    rows = [
        [f"matrix products, {name}", f"{x / 1e12:,.4g} TFLOP/s"]
        for name, x in rates.products.items()
    ]
    rows += [["copy, read and written", f"{rates.copy / 1e9:,.0f} GB/s"]]
    rows += [["launches of small kernels", f"{rates.launch * 1e6:.1f} µs each"]]
    part.tell(Table(["this card", "rate"], rows).markdown())
    return rates


def measure_steps(
    part: Part, trunk: str, images: int, seconds: float, rates: Sequence[Rates]
) -> None:
    """The table of one trunk and batch; its rounds end when its seconds are used."""
    end = part.clock() + seconds
    steps = Steps(part, trunk, images)
    memory = {}
    for name in list(steps.networks):
        try:
            steps.step(name)  # makes Adam's state, lets cuDNN choose
            memory[name] = peak_megabytes(partial(steps.step, name), part.device)
        except Exception:
            if name == ALONE:
                raise
            part.run(f"{trunk}, {images} images, {name}", 0, partial(steps.step, name))
            del steps.networks[name]
            memory.pop(name, None)
    rows = {name: partial(steps.step, name) for name in steps.networks}
    calls, most = (1, 1) if part.tiny else (4, 25)
    rounds = alternate(rows, part.device, lambda: part.clock() > end, calls=calls, most=most)
    header = [
        "",
        "step, ms",
        "ratio",
        "least to most",
        "extra, ms",
        "floor, ms",
        "extra / floor",
        "MB",
    ]
    table = Table(header, [])
    for name, times in rounds.items():
        every = ratios(rounds, name)
        row = [name, f"{1e3 * median(times):.2f}"]
        if name == ALONE:
            row += ["1", *[""] * 4]
        else:
            extra = extra_seconds(rounds, name)
            row += [
                f"{median(every):.3f}",
                f"{min(every):.3f} to {max(every):.3f}",
                f"{1e3 * extra:.2f}",
            ]
            floor = METHODS[name][1](steps.sizes).seconds(rates[0]) if rates else 0
            row += [f"{1e3 * floor:.3f}", f"{extra / floor:.1f}"] if floor else ["", ""]
        table.rows.append([*row, f"{memory[name]:,.0f}"])
    done = f"{len(rounds[ALONE])} rounds of {calls} steps"
    part.tell(f"### {trunk}, {len(steps.images)} images\n\n{done}.\n\n{table.markdown()}")


def measure_losses_alone(part: Part) -> None:
    """Where the time of small losses goes: the host's share, the kernels, the most expensive operations."""
    steps = Steps(part, "resnet50", 40)
    table = Table(["", "until the host is done, ms", "until the GPU is done, ms", "kernels"], [])
    calls = 1 if part.tiny else 20
    times = {}
    for name in steps.networks:
        run = partial(steps.loss_alone, name)
        run()
        host = host_seconds(run, part.device, calls)
        done = median([seconds_of(run, part.device) for _ in range(calls)])
        times[name] = [f"{1e3 * host:.2f}", f"{1e3 * done:.2f}"]
    for name, row in times.items():  # last: a profiler may slow down what follows
        launched, _ = profile(partial(steps.loss_alone, name), part.device)
        table.rows.append([name, *row, f"{launched:,}" if launched else ""])
    part.tell(
        "### Head and loss alone\n\nForward and backward on kept outputs of resnet50, "
        f"{len(steps.images)} images, on an idle GPU.\n\n{table.markdown()}"
    )
    if path := os.environ.get(PROFILE):
        name = next(iter(METHODS))
        texts = []
        for title, run in (("head and loss", steps.loss_alone), ("whole step", steps.step)):
            run(name)
            launched, text = profile(partial(run, name), part.device)
            texts.append(f"{name}, {title}: {launched} kernels\n{text}\n")
        Path(path).write_text("\n".join(texts))


def measure_blocks(part: Part) -> None:
    """Forward and backward of the moments at several block sizes; the size that is set comes first."""
    sizes = paper_sizes(part.tiny)
    x, gradient = draw_features(part, sizes)
    x.requires_grad_()
    matrices = [W.requires_grad_() for W in draw_matrices(part, sizes, fixed=False)]
    small = default_order(sizes)
    tables, other = draw_tables(part, small), gradient[: small.K - 1, :, : small.d].contiguous()

    def trained() -> object:
        return torch.autograd.grad(project(x, *matrices), [x, *matrices], gradient)

    def sketched() -> object:
        return torch.autograd.grad(convolutions.summed_convolutions(x, tables), x, other)

    cases = {
        f"products, K = {sizes.K}, d = {sizes.d}": (products, trained, range(20, 27)),
        f"sketches, K = {small.K}, d = {small.d}": (convolutions, sketched, range(18, 25)),
    }
    for title, (module, run, powers) in cases.items():
        end = part.clock() + 4
        blocks = [module.GPU_BLOCK, *(2**k for k in ((8, 10) if part.tiny else powers))]
        rows = {
            f"{block:,}": partial(with_block, module, block, run) for block in dict.fromkeys(blocks)
        }
        seconds_of(run, part.device)
        most = 1 if part.tiny else 15
        rounds = alternate(
            rows, part.device, lambda end=end: part.clock() > end, calls=2, most=most
        )
        lines = [
            [name, f"{1e3 * median(times):.2f}", f"{median(ratios(rounds, name)):.3f}"]
            for name, times in rounds.items()
        ]
        about = (
            f"{sizes.N} maps of {sizes.P} positions and {sizes.C} channels, forward and backward; "
        )
        about += (
            f"{len(next(iter(rounds.values())))} rounds. The first row is `GPU_BLOCK` as it is."
        )
        table = Table(["numbers in a block", "ms", "ratio"], lines)
        part.tell(f"### Block sizes: {title}\n\n{about}\n\n{table.markdown()}")


def with_block(module: Any, block: int, run: Callable[[], object]) -> object:
    with mock.patch.object(module, "GPU_BLOCK", block):
        return run()


def measure_compiled(part: Part) -> None:
    """Steps with the loss alone, and with the same loss compiled."""
    if part.tiny or not (shutil.which("cc") or shutil.which("gcc")):
        part.leave_out("torch.compile of the loss (tiny, or no C compiler)")
        return
    end = part.clock() + 12
    steps = Steps(part, "resnet50", 40)
    compiled = "binomial deviance, compiled"
    network = steps.network(compiled, ours.BinomialDevianceLoss())
    network.loss = torch.compile(network.loss)
    steps.networks[compiled] = network
    steps.optimizers[compiled] = torch.optim.Adam(network.parameters(), lr=1e-6, fused=True)
    rows = {name: partial(steps.step, name) for name in (ALONE, compiled, next(iter(METHODS)))}
    for run in rows.values():
        run()
    rounds = alternate(rows, part.device, lambda: part.clock() > end, calls=4)
    lines = [
        [name, f"{1e3 * median(times):.2f}", f"{median(ratios(rounds, name)):.3f}"]
        for name, times in rounds.items()
    ]
    table = Table(["", "step, ms", "ratio"], lines).markdown()
    part.tell(
        f"### resnet50, 40 images, the loss compiled\n\n{len(rounds[ALONE])} rounds.\n\n{table}"
    )


# -------------------------------------------------------------------------------------- retrieval


@limit(30)
def test_retrieval(part: Part) -> None:
    """Evaluation at the size of Stanford Online Products.

    Recall@1, 10, 100, 1000, MAP@R and R-precision of 60,502 random vectors of 512 in 11,316 classes, each among all
    others. The accuracies of `RankAccuracyCalculator` are compared with those from all distances in float64 on the
    GPU, from which rare near ties differ. Times: one matrix product with all distances, in blocks of 1,024 queries,
    is the floor; then the same with torch's `topk` of 1,000; `RankAccuracyCalculator`; and PML's
    `AccuracyCalculator` with PML's own search by torch for k = 1,000 neighbours, which knows no Recall@K beyond
    Precision@1.
    """
    n, width, classes, recalls = (
        (60, 8, 12, (1, 10)) if part.tiny else (60_502, 512, 11_316, (1, 10, 100, 1000))
    )
    labels = torch.arange(n, device=part.device) % classes
    centres = torch.randn(classes, width, device=part.device)
    vectors = F.normalize(centres[labels] + 1.5 * torch.randn(n, width, device=part.device))
    k, block = min(1000, n - 1), 1024
    names = ("mean_average_precision_at_r", "r_precision", *(f"recall_at_{K}" for K in recalls))
    calculator = ours.RankAccuracyCalculator(names, device=part.device, recall_at=recalls)

    def multiply() -> None:
        for rows in vectors.split(block):
            rows @ vectors.T

    def search() -> None:
        for rows in vectors.split(block):
            (rows @ vectors.T).topk(k)

    def rank() -> dict[str, float]:
        found: dict[str, float] = calculator.get_accuracy(vectors, labels)
        return found

    def by_lists() -> dict[str, float]:
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN

        search = CustomKNN(CosineSimilarity(), batch_size=block)
        include = ("precision_at_1", *names[:2])
        pml = AccuracyCalculator(include, k=k, device=part.device, knn_func=search)
        found: dict[str, float] = pml.get_accuracy(vectors, labels)
        return found

    def check() -> None:
        expected = exact_accuracies(vectors.double(), labels, recalls)
        found = rank()
        for name in names:
            part.check(name, found[name], expected[name], 1e-4)

    def measure() -> None:
        candidates = {"matrix product alone": multiply, "matrix product and topk": search}
        candidates["RankAccuracyCalculator"] = rank
        megabytes = {name: peak_megabytes(run, part.device) for name, run in candidates.items()}
        end = part.clock() + 6
        rounds = alternate(
            candidates, part.device, lambda: part.clock() > end, most=1 if part.tiny else 9
        )
        lines = [
            [
                name,
                f"{median(s):.3g}",
                f"{median(ratios(rounds, name)):.2f}",
                f"{megabytes[name]:,.0f}",
            ]
            for name, s in rounds.items()
        ]
        table = Table(["", "seconds", "ratio", "MB"], lines)
        part.tell(f"{len(rounds['RankAccuracyCalculator'])} rounds.\n\n{table.markdown()}")

    def measure_pml() -> None:
        accuracies: list[dict[str, float]] = []
        wait(part.device)
        seconds = seconds_of(lambda: accuracies.append(by_lists()), part.device)
        own = seconds_of(rank, part.device)
        part.tell(
            f"PML's `AccuracyCalculator`, k = {k:,}, once: {seconds:.3g} s, directly before "
            f"`RankAccuracyCalculator`: {own:.3g} s."
        )
        found = rank()
        part.check(
            "PML's precision_at_1", accuracies[0]["precision_at_1"], found["recall_at_1"], 1e-3
        )
        part.check("PML's MAP@R", accuracies[0][names[0]], found[names[0]], 1e-3)

    part.run("accuracies against float64", 4, check)
    part.run("times", 4, measure)
    part.run("PML's AccuracyCalculator", 12, measure_pml)


# ------------------------------------------------------------------------------------ the rest


@limit(15)
def test_float16(part: Part) -> None:
    """float16 with a scaler, and channels_last.

    The loss of HORDE behind ResNet-50 in float16, against float64 on the GPU. A scale that makes gradients infinite
    must leave all weights as they are, and be halved; in later steps, at a scale of 1024, the loss must fall. Maps
    in channels_last must give HORDE the value and the gradients of contiguous ones.
    """
    part.run("float16 with a scaler", 8, partial(check_scaler, part))
    part.run("channels_last", 3, partial(check_channels_last, part))


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


@limit(45)
@pytest.mark.slow
def test_glyphs(part: Part) -> None:
    """A run on Glyphs by the runner.

    `benchmarks/run.py --recipe glyphs/demo/binomial_horde`, shortened to 300 steps of 80 images of 32 px. Its
    images per second are those of the training steps, without tests and checkpoints. The loss must fall.
    """
    from benchmarks.records import load_run
    from benchmarks.run import main

    words = ["--recipe=glyphs/demo/binomial_horde", "--report=false", "--evaluation.every=0"]
    words += (
        ["--data.max_classes=24", "--optimization.steps=2"]
        if part.tiny
        else ["--optimization.steps=300"]
    )
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words, f"--data.root={folder}/data", f"--output={folder}/run"]) == 0
        run = load_run(Path(folder, "run"))
        losses = run.table("training")["loss"]
    about = run.info
    rows = [["images per second", f"{about['images_per_second']:.0f}"]]
    rows += [["Recall@1 at the end", f"{about['metrics']['recall_at_1']:.3f}"]]
    rows += [[f"peak memory, {k}", f"{x:.2f} GiB"] for k, x in about["peak_memory_gib"].items()]
    rows += [["loss at first and at the end", f"{losses[0]:.4g}, {losses[-1]:.4g}"]]
    part.tell(Table(["the run", ""], rows).markdown())
    assert part.tiny or losses[-1] < losses[0], (
        f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
    )
