"""Training steps with each method, and where their time goes."""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import nn

import pml_regularizers as ours
from benchmarks.reporting import Table
from benchmarks.speed.measuring import Comparison
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tools.gpu import floors
from tools.gpu.correctness import (
    PAPER,
    TRUNKS,
    draw_features,
    draw_matrices,
    draw_tables,
    project,
)
from tools.gpu.networks import Network, Sizes, horde, make_trunk
from tools.gpu.part import Part
from tools.gpu.timing import Rates, matmul_precision, measure_rates, peak_bytes

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
        lambda _: beside(ours.EnergyConfusionRegularizer(gradient="fc")),
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
        device, (side, N) = part.device, (32, 4) if part.tiny else (256, images)
        self.trunk = make_trunk(trunk, part.tiny).to(device, memory_format=torch.channels_last)
        batch = torch.randn(N, 3, side, side, device=device)
        self.images = batch.contiguous(memory_format=torch.channels_last)
        self.labels = torch.arange(N, device=device) // 4
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            P = self.trunk(self.images)[0, 0].numel()
        C, (E, d, K) = self.trunk.num_features, (8, 64, 3) if part.tiny else (512, 8192, 5)
        self.sizes = Sizes(N, P, C, E, d, K, 100)
        self.trained: dict[str, tuple[Network, torch.optim.Optimizer]] = {}

    def add(self, name: str) -> None:
        """Make the network and the optimizer of a method, and take a step."""
        with self.images.device:  # drawing the paper's matrices on the CPU takes seconds
            loss = METHODS[name][0](self.sizes)
            network = Network(self.trunk, self.sizes.C, self.sizes.E, loss, vem=name == "VEM")
        network = network.to(self.images.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-6, fused=True)
        self.step(network, optimizer)  # makes Adam's state, lets cuDNN choose
        self.trained[name] = network, optimizer

    def step(self, network: Network, optimizer: torch.optim.Optimizer) -> None:
        network(self.images, self.labels, torch.bfloat16).backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps(self, name: str) -> None:
        for _ in range(CALLS):
            self.step(*self.trained[name])


def measure_steps(part: Part, trunk: str, images: int, rates: Rates) -> None:
    """The table of one trunk and batch."""
    steps = Steps(part, trunk, images)
    for name in METHODS:
        part.run(f"{trunk}, {images} images, {name}", 0, partial(steps.add, name))
    rows = {name: partial(steps.steps, name) for name in steps.trained}
    rounds, memory = Comparison(trunk, "", rows, rounds=5, memory=peak_bytes).measure(part.tiny)
    header = ["", "step, ms", "ratio", "least to most", "extra, ms", "floor, ms", "extra / floor"]
    table = Table([*header, "MB"], [])
    for name, times in rounds.items():
        pairs = list(zip(times, rounds[ALONE], strict=True))
        ratios = [own / base for own, base in pairs]
        extra = statistics.median(own - base for own, base in pairs) / CALLS
        floor = METHODS[name][1](steps.sizes).seconds(rates)
        row = [f"{1e3 * statistics.median(times) / CALLS:.2f}", f"{statistics.median(ratios):.3f}"]
        row += [f"{min(ratios):.3f} to {max(ratios):.3f}", f"{1e3 * extra:.2f}"]
        # Launches alone take longer than a tenth of a millisecond.
        row += [f"{1e3 * floor:.2f}", f"{extra / floor:.1f}" if floor > 1e-4 else ""]
        table.rows.append([name, *row, f"{memory[name] / 1e6:,.0f}"])
    about = f"{len(rounds[ALONE])} rounds of {CALLS} steps"
    part.tell(f"### {trunk}, {len(steps.images)} images\n\n{about}.\n\n{table.markdown()}")


def measure_blocks(part: Part) -> None:
    """Forward and backward of the moments at several block sizes; the size that is set comes first."""
    sizes = PAPER[part.tiny]
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


def steps(part: Part) -> None:
    """Whole training steps with each method.

    A step is the forward and backward pass of ResNet-50 or GoogLeNet at 256 px, a head of 512 and a loss, and fused
    Adam, under autocast to bfloat16, in channels_last; products in float32 run in TF32. HORDE's default are
    sketches of orders 2 and 3 with d = 1024; random and cascaded ones have the paper's K = 5 and d = 8192. Extra is
    what a step takes longer than with binomial deviance alone. The floor is the time that its added matrix products
    and passes over memory take at the rates of this card, which the first table gives; `tools/gpu/floors.py` counts
    them. Launches of kernels are not in the floor: what adds next to no work still has to launch. Memory is the
    growth of the peak of torch's allocator in a step.
    """
    rates = measure_rates(part.tiny, part.device)
    rows = [
        [f"matrix products, {name}", f"{x / 1e12:,.4g} TFLOP/s"]
        for name, x in rates.products.items()
    ]
    rows += [["copy, read and written", f"{rates.copy / 1e9:,.0f} GB/s"]]
    rows += [["launches of small kernels", f"{rates.launch * 1e6:.1f} µs each"]]
    part.tell(Table(["this card", "rate"], rows).markdown())
    benchmark = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False)
    with benchmark, matmul_precision("high"):  # as in a training that shall be fast
        for images, seconds in ((40, 14), (112, 18))[: 1 if part.tiny else 2]:
            for trunk in TRUNKS[: 1 if part.tiny else 2]:
                measure = partial(measure_steps, part, trunk, images, rates)
                part.run(f"{trunk}, {images} images", seconds, measure)
        part.run("block sizes", 8, partial(measure_blocks, part))


def glyphs(part: Part) -> None:
    """A run on Glyphs by the runner.

    `benchmarks/run.py --recipe glyphs/demo/binomial_horde`, shortened to 300 steps of 80 images of 32 px. Its
    images per second are those of the training steps, without tests and checkpoints. The loss must fall.
    """
    from benchmarks.records import load_run
    from benchmarks.run import main

    words = ["--recipe=glyphs/demo/binomial_horde", "--report=false", "--evaluation.every=0"]
    words += ["--data.max_classes=24"] if part.tiny else []
    words += [f"--optimization.steps={2 if part.tiny else 300}"]
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words, f"--data.root={folder}", f"--output={folder}/run"]) == 0
        run = load_run(Path(folder, "run"))
        losses = run.table("training")["loss"]
    about = run.info
    rows = [["images per second", f"{about['images_per_second']:.0f}"]]
    rows += [["Recall@1 at the end", f"{about['metrics']['recall_at_1']:.3f}"]]
    if gibibytes := about["peak_memory_gib"].get("gpu"):
        rows += [["peak memory on the GPU", f"{gibibytes:.2f} GiB"]]
    rows += [["loss at first and at the end", f"{losses[0]:.4g}, {losses[-1]:.4g}"]]
    part.tell(Table(["the run", ""], rows).markdown())
    rose = f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
    assert part.tiny or losses[-1] < losses[0], rose
