"""Training steps with each method, and where their time goes."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import Tensor, nn

import pml_regularizers as ours
from benchmarks.reporting import Table
from benchmarks.speed.measuring import Comparison
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tests.gpu import floors
from tests.gpu.correctness import (
    can_compile,
    draw_features,
    draw_matrices,
    draw_tables,
    paper_sizes,
    project,
)
from tests.gpu.networks import Network, Sizes, horde, make_trunk
from tests.gpu.part import Part
from tests.gpu.timing import Rates, count_kernels, measure_rates, peak_bytes, seconds_of

CALLS = 4
"""Steps that are timed at once, without a wait between them."""

ALONE, DEFAULT = "binomial deviance alone", "HORDE, sketch (default)"

METHODS: Mapping[str, tuple[Callable[[Sizes], nn.Module], Callable[[Sizes], floors.Work]]] = {
    ALONE: (lambda _: ours.BinomialDevianceLoss(), lambda _: floors.Work()),
    DEFAULT: (lambda s: horde(default_order(s)), lambda s: floors.sketched(default_order(s))),
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
        lambda _: beside(ours.EnergyConfusionRegularizer()),
        floors.energy_confusion,
    ),
    "VEM": (lambda _: beside(ours.VarianceRegularizer()), floors.variance),
}
"""Losses in place of binomial deviance, which they contain, except for JRD; and the work that they add."""


def default_order(sizes: Sizes) -> Sizes:
    """With the order and the width of HORDELoss's defaults."""
    return sizes._replace(K=3, d=min(sizes.d, 1024))


def beside(regularizer: nn.Module) -> Any:
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
        self.trained: dict[str, tuple[Network, torch.optim.Optimizer]] = {}

    def add(self, name: str, method: str, change: Callable[[nn.Module], Any] | None = None) -> None:
        """Make the network and the optimizer of a method, its loss changed by a function such as torch.compile."""
        with self.device:  # drawing the paper's matrices on the CPU takes seconds
            loss = METHODS[method][0](self.sizes)
            network = Network(self.trunk, self.sizes.C, self.sizes.E, loss, vem=method == "VEM")
        network = network.to(self.device)
        network.loss = change(network.loss) if change else network.loss
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-6, fused=True)
        self.trained[name] = network, optimizer

    def trunk_output(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            output: Tensor = self.trunk(images)
        return output

    def step(self, name: str) -> None:
        """A whole training step."""
        network, optimizer = self.trained[name]
        network(self.images, self.labels, torch.bfloat16).backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps(self, name: str) -> None:
        for _ in range(CALLS):
            self.step(name)

    def loss_alone(self, name: str) -> None:
        """Head and loss, forward and backward, on kept outputs of the trunk."""
        network, _ = self.trained[name]
        features = self.features.detach().requires_grad_()
        with torch.autocast(self.device.type, torch.bfloat16):
            embeddings = network.head(features)
        network.loss(embeddings, self.labels).backward()
        network.zero_grad()


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


def measure_steps(part: Part, trunk: str, images: int, rates: Sequence[Rates]) -> None:
    """The table of one trunk and batch."""
    steps, ready = Steps(part, trunk, images), []

    def warm(name: str) -> None:
        steps.add(name, name)
        steps.step(name)  # makes Adam's state, lets cuDNN choose
        ready.append(name)

    for name in METHODS:
        part.run(f"{trunk}, {images} images, {name}", 0, partial(warm, name))
    if ALONE not in ready:  # nothing to compare with
        return
    rows = {name: partial(steps.steps, name) for name in ready}
    rounds, memory = Comparison(trunk, "", rows, rounds=5, memory=peak_bytes).measure(part.tiny)
    header = ["", "step, ms", "ratio", "least to most", "extra, ms", "floor, ms", "extra / floor"]
    table = Table([*header, "MB"], [])
    for name, times in rounds.items():
        pairs = list(zip(times, rounds[ALONE], strict=True))
        ratios = [own / base for own, base in pairs]
        extra = statistics.median(own - base for own, base in pairs) / CALLS
        floor = METHODS[name][1](steps.sizes).seconds(rates[0]) if rates else 0
        row = [f"{1e3 * statistics.median(times) / CALLS:.2f}", f"{statistics.median(ratios):.3f}"]
        row += [f"{min(ratios):.3f} to {max(ratios):.3f}", f"{1e3 * extra:.2f}"]
        row += [f"{1e3 * floor:.2f}" if rates else ""]
        # Launches alone take longer than a tenth of a millisecond.
        row += [f"{extra / floor:.1f}" if floor > 1e-4 else ""]
        table.rows.append([name, *row, f"{memory[name] / 1e6:,.0f}"])
    about = f"{len(rounds[ALONE])} rounds of {CALLS} steps"
    part.tell(f"### {trunk}, {len(steps.images)} images\n\n{about}.\n\n{table.markdown()}")


def measure_losses_alone(part: Part) -> None:
    """Where the time of small losses goes: the host's share, and the kernels."""
    steps = Steps(part, "resnet50", 40)
    table = Table(["", "until the host is done, ms", "until the GPU is done, ms", "kernels"], [])
    for name in METHODS:
        steps.add(name, name)
        run = partial(steps.loss_alone, name)
        run()
        times = [seconds_of(run) for _ in range(1 if part.tiny else 20)]
        host, done = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        table.rows.append([name, f"{host:.2f}", f"{done:.2f}"])
    for row in table.rows:  # last: a profiler may slow down what follows
        row.append(f"{count_kernels(partial(steps.loss_alone, row[0])):,}")
    part.tell(
        "### Head and loss alone\n\nForward and backward on kept outputs of resnet50, "
        f"{len(steps.images)} images, on an idle GPU.\n\n{table.markdown()}"
    )


def measure_blocks(part: Part) -> None:
    """Forward and backward of the moments at several block sizes; the size that is set comes first."""
    sizes = paper_sizes(part.tiny)
    x, gradient = draw_features(part, sizes)
    x.requires_grad_()
    matrices = [W.requires_grad_() for W in draw_matrices(part, sizes)]
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
    size = f"{sizes.N} maps of {sizes.P} positions and {sizes.C} channels, forward and backward"
    for title, (module, run, powers) in cases.items():
        blocks = [module.GPU_BLOCK, *(2**k for k in ((8, 10) if part.tiny else powers))]
        rows = {
            f"{block:,} numbers in a block": partial(with_block, module, block, run)
            for block in dict.fromkeys(blocks)
        }
        times = Comparison(f"Block sizes: {title}", size, rows, rounds=15, memory=None)
        part.tell(times.section(part.tiny))


def with_block(module: Any, block: int, run: Callable[[], object]) -> None:
    with mock.patch.object(module, "GPU_BLOCK", block):
        for _ in range(2):
            run()


def measure_compiled(part: Part) -> None:
    """Steps with the loss alone, and with the same loss compiled."""
    if not can_compile(part):
        return
    steps, compiled = Steps(part, "resnet50", 40), "binomial deviance, compiled"
    steps.add(ALONE, ALONE)
    steps.add(compiled, ALONE, torch.compile)
    steps.add(DEFAULT, DEFAULT)
    rows = {name: partial(steps.steps, name) for name in steps.trained}
    times = Comparison("The loss compiled", "resnet50, 40 images", rows, rounds=9, memory=None)
    part.tell(times.section(part.tiny))
