"""Training steps with each method, and where their time goes."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pml_regularizers as ours
from benchmarks.reporting import Table
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tests.gpu import floors
from tests.gpu.correctness import draw_features, draw_matrices, draw_tables, paper_sizes, project
from tests.gpu.networks import Network, Sizes, horde, make_trunk
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
)

PROFILE = "GPU_PROFILE"
"""Environment variable: the file for the ten most expensive operations of a step."""


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

LOSSES: Mapping[str, Callable[[Sizes], nn.Module]] = {
    ALONE: lambda _: ours.BinomialDevianceLoss(),
    **{name: make for name, (make, _) in METHODS.items()},
}


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
        self.networks: dict[str, Network] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    def add(self, name: str, change: Callable[[nn.Module], Any] = lambda loss: loss) -> None:
        """Make the network and the optimizer of a method, its loss changed by a function such as torch.compile."""
        with self.device:  # drawing the paper's matrices on the CPU takes seconds
            loss = LOSSES[name](self.sizes)
            network = Network(self.trunk, self.sizes.C, self.sizes.E, loss, vem=name == "VEM")
        network = network.to(self.device)
        network.loss = change(network.loss)
        self.networks[name] = network
        self.optimizers[name] = torch.optim.Adam(network.parameters(), lr=1e-6, fused=True)

    def trunk_output(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            output: Tensor = self.trunk(images)
        return output

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
    memory: dict[str, float] = {}

    def warm(name: str) -> None:
        steps.add(name)
        steps.step(name)  # makes Adam's state, lets cuDNN choose
        memory[name] = peak_megabytes(partial(steps.step, name), part.device)

    for name in LOSSES:
        part.run(f"{trunk}, {images} images, {name}", 0, partial(warm, name))
    if ALONE not in memory:  # nothing to compare with
        return
    rows = {name: partial(steps.step, name) for name in memory}
    for run in rows.values():
        run()
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
            # Launches alone take longer than a tenth of a millisecond.
            ratio = f"{extra / floor:.1f}" if floor > 1e-4 else ""
            row += [f"{1e3 * floor:.2f}", ratio] if rates else ["", ""]
        table.rows.append([*row, f"{memory[name]:,.0f}"])
    done = f"{len(rounds[ALONE])} rounds of {calls} steps"
    part.tell(f"### {trunk}, {len(steps.images)} images\n\n{done}.\n\n{table.markdown()}")


def measure_losses_alone(part: Part) -> None:
    """Where the time of small losses goes: the host's share, the kernels, the most expensive operations."""
    steps = Steps(part, "resnet50", 40)
    table = Table(["", "until the host is done, ms", "until the GPU is done, ms", "kernels"], [])
    calls = 1 if part.tiny else 20
    times = {}
    for name in LOSSES:
        steps.add(name)
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
    steps, compiled = Steps(part, "resnet50", 40), "binomial deviance, compiled"
    steps.add(ALONE, torch.compile)
    steps.networks[compiled] = steps.networks.pop(ALONE)
    steps.optimizers[compiled] = steps.optimizers.pop(ALONE)
    steps.add(ALONE)
    steps.add(default := next(iter(METHODS)))
    rows = {name: partial(steps.step, name) for name in (ALONE, compiled, default)}
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
