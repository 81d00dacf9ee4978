"""Measures time and memory: each method over its sizes, fixed beside trained projections, and steps of networks.

    python -m benchmarks.speed.size_pages [--tiny] [--output docs/costs]

This takes some minutes on two cores. It writes PAGE.md, and the figures into a folder PAGE.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.records import replace_file
from benchmarks.reporting import COLOURS, MARKERS, Table, svg
from benchmarks.speed.measuring import (
    Comparison,
    Measured,
    Sizes,
    Sweep,
    current_device,
    measure_over,
    origin,
    page_parser,
    section,
)
from benchmarks.speed.steps import EMBEDDING, Device, Step, network_steps, training_step
from pml_regularizers import (
    BinomialDevianceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    HORDELoss,
    JRDLoss,
    VarianceRegularizer,
    VEMAttention,
)
from pml_regularizers.moments import Projections

INTRODUCTION = """# What the methods cost

{origin}
`make costs` uses one thread, and an allocator that keeps freed memory. Otherwise the time of large tensors would
include the time in which the system clears fresh pages for them.

Rows are measured alternately, for the number of rounds given. A time is the median over the rounds of the ratio to
the time of the first row, or of the row above that has seconds, in the same round. Memory is the peak of the bytes
in tensors, without inputs and results, counted after every operation.

## Over one size at a time

The tables measure a forward and a backward pass. One size varies at a time; the others stay at a base point. The
columns "over" have the slopes of time and of memory: those of a line fitted to the logarithms of the upper half of
a size's values. 0 means independent of the size, 1 proportional, 2 quadratic. Gradients are results, so their
memory does not count here.
"""

CROSSOVER = """## Where fixed or smaller projections pay

The table counts bytes of HORDE with K = 5 on 1,024 channels, E = 512. For trained projections and embeddings,
these are the parameters, their gradients and Adam's state. Fixed projections have no embeddings and need one byte
for each entry, a sixteenth of that: as much as trained projections of d / 16. The last column is the number of
images whose stored activations, at 8 x 8 positions, need as many bytes as fixed projections save.
"""

STEPS = """The next tables have steps of head and loss, with trained projections and with fixed ones of the same
width. The time of the fixed ones is a ratio to that of the trained ones. The maps, of 8 x 8 positions, are given;
Adam's update is included.
"""

REAL = """## A step of a real network

A step is a forward pass, a backward pass, and Adam's update of all parameters of network and loss. Its time is a
multiple of that of the step without the method. The work of the update does not depend on the batch: its share is
smaller with larger batches, such as HORDE's 40 images.
"""

WIDTHS = (512, 1024, 2048, 4096, 8192)  # d, where bytes are counted; the last is the paper's

TIMED_WIDTHS = (128, 256, 512, 1024, 2048)  # d of trained and fixed projections in training steps

POSITIONS = 64  # of a map of 8 x 8


# ------------------------------------------------------------------------- forward and backward pass


def horde(tiny: bool, device: Device) -> Comparison:
    """Moments, their embeddings and binomial deviance on each order.

    The base point has the paper's 40 maps of 8 x 8 from 5 classes, but a quarter of GoogLeNet's 1,024 channels
    and 1/32 of the paper's d = 8,192; E = 512. Fixed projections have no embeddings, as in the paper's Table 3.
    """

    def step(sizes: Sizes, **options: Any) -> Step:
        N, C, K, d = (sizes[name] for name in ("N", "C", "K", "d"))
        loss = HORDELoss(BinomialDevianceLoss(), C, EMBEDDING, order=K, moment_dim=d, **options)
        return _pass(loss.to(device), sizes, _leaf(N, C, 8, POSITIONS // 8, device=device))

    variants: dict[str, dict[str, Any]] = {
        "trained, stored": {"activations": "store"},
        "trained, recomputed": {"activations": "recompute"},
        "fixed, stored": {"projections": "random", "activations": "store"},
        "fixed, recomputed": {"projections": "random", "activations": "recompute"},
    }
    grids = {
        "N": (10, 20, 40, 80, 160),
        "C": (64, 128, 256, 512, 1024),
        "d": (64, 128, 256, 512, 1024),
        "K": (2, 3, 5, 7, 10),
        "classes": (2, 5, 10, 20),
    }
    base = {"N": 40, "C": 256, "d": 256, "K": 5, "classes": 5}

    def at(sizes: Sizes) -> dict[str, Step]:
        return {name: step(sizes, **options) for name, options in variants.items()}

    return _over("HORDE", horde.__doc__, base, grids, at, 3, tiny)


def energy_confusion(tiny: bool, device: Device) -> Comparison:
    """The regularizer alone.

    The base point has the paper's 64 classes and E = 512. It has 1,024 images instead of the paper's 128, so
    that the arithmetic takes more time than the calls of operations.
    """
    regularizer = EnergyConfusionRegularizer(gradient="all")

    def step(sizes: Sizes) -> Step:
        embeddings, labels = _batch(sizes["N"], sizes["classes"], device, sizes["E"])
        return lambda: torch.autograd.grad(regularizer(embeddings, labels), embeddings)

    grids = {
        "N": (128, 256, 512, 1024, 2048, 4096),
        "E": (64, 128, 256, 512, 1024, 2048),
        "classes": (8, 16, 32, 64, 128, 256, 512),
    }
    base = {"N": 1024, "E": 512, "classes": 64}
    about = energy_confusion.__doc__
    return _over(
        "Energy confusion", about, base, grids, lambda sizes: {"closed form": step(sizes)}, 9, tiny
    )


def vem(tiny: bool, device: Device) -> Comparison:
    """The gate on pooled features and its regularizer.

    The base point is the paper's: 64 images, 2,048 channels.
    """

    def step(sizes: Sizes) -> Step:
        N, C = sizes["N"], sizes["C"]
        attention, regularizer = VEMAttention(C).to(device), VarianceRegularizer()
        pooled, predicted = _leaf(N, C, device=device), attention.variance
        gradient = torch.randn(N, C, device=device)

        def run() -> object:
            gated = attention(pooled)
            value = regularizer(gated, features=(pooled, predicted))
            return torch.autograd.grad([gated, value], [pooled, predicted], [gradient, None])

        return run

    grids = {"N": (16, 64, 256, 1024, 4096), "C": (512, 2048, 8192, 32768, 131072)}
    base, title = {"N": 64, "C": 2048}, "Variance attention (VEM)"

    def at(sizes: Sizes) -> dict[str, Step]:
        return {"gate and regularizer": step(sizes)}

    return _over(title, vem.__doc__, base, grids, at, 9, tiny)


def jrd(tiny: bool, device: Device) -> Comparison:
    """AM-softmax and the similarity of pooled features, embeddings and classes.

    The base point is the paper's on Stanford Online Products: 120 images, C = 1,024 channels, 11,318 classes; E
    = 512.
    """

    def step(sizes: Sizes) -> Step:
        loss = JRDLoss(sizes["classes"], EMBEDDING).to(device)
        return _pass(loss, sizes, _leaf(sizes["N"], sizes["C"], device=device), "pooled")

    grids = {
        "N": (30, 60, 120, 240, 480),
        "C": (256, 512, 1024, 2048, 4096),
        "classes": (1415, 2830, 5659, 11318, 22636, 45272),
    }
    base = {"N": 120, "C": 1024, "classes": 11318}
    title = "Joint representation diversification (JRD)"
    return _over(title, jrd.__doc__, base, grids, lambda sizes: {"JRD": step(sizes)}, 5, tiny)


METHODS = (horde, energy_confusion, vem, jrd)


def _over(
    title: str,
    about: str | None,
    base: Sizes,
    grids: Mapping[str, Sequence[int]],
    at: Callable[[Sizes], Mapping[str, Step]],
    rounds: int,
    tiny: bool,
) -> Comparison:
    """A comparison of variants at a base point, and over one size at a time."""
    if tiny:
        small = dict(zip(base, (8, 6, 4, 2), strict=False)) | {"classes": 8}
        base = {name: small[name] for name in base}
        grids = {name: (n, n + 1, n + 2) for name, n in base.items()}
    point = ", ".join(f"{size} = {value:,}" for size, value in base.items())
    size = f"{' '.join(str(about).split())} Base point: {point}"
    candidates = at(base)
    first = next(iter(candidates))
    return Comparison(title, size, candidates, first, rounds=rounds, grids=grids, base=base, at=at)


def _pass(loss: nn.Module, sizes: Sizes, read: Tensor, stage: str | None = None) -> Step:
    embeddings, labels = _batch(sizes["N"], sizes["classes"], read.device)
    inputs = [embeddings, read, *loss.parameters()]
    features = read if stage is None else {stage: read}
    return lambda: torch.autograd.grad(loss(embeddings, labels, features=features), inputs)


def _batch(N: int, classes: int, device: Device, width: int = EMBEDDING) -> tuple[Tensor, Tensor]:
    embeddings = F.normalize(torch.randn(N, width, device=device)).requires_grad_()
    return embeddings, torch.arange(N, device=device) % classes


def _leaf(*shape: int, device: Device) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


# ------------------------------------------------------------------------------------ training steps


def horde_steps(N: int, tiny: bool, device: Device) -> Comparison:
    """A step of head and loss on given maps, including Adam, with trained and with fixed projections."""
    N, C = (2, 16) if tiny else (N, 1024)
    maps = _leaf(N, C, 8, POSITIONS // 8, device=device)
    kinds: dict[str, Projections] = {"trained": "cascaded", "fixed": "random"}

    def step(projections: Projections, d: int) -> Step:
        head = EmbeddingHead(C, EMBEDDING)
        return training_step(nn.Identity(), head, _horde(C, d, projections).attach(head), maps)

    rows = {f"{kind}, d = {d:,}": step(p, d) for d in TIMED_WIDTHS for kind, p in kinds.items()}
    return Comparison(
        f"A step of head and loss, {N} images",
        f"{N} maps of 8 x 8 x {C}, K = 5, E = {EMBEDDING}",
        rows,
        rounds=3,
        against={name: name.replace("fixed", "trained") for name in rows},
    )


def empty_horde(d: int, projections: Projections) -> HORDELoss:
    """HORDE at the paper's size, except for d, on the meta device: it takes no memory."""
    with torch.device("meta"):
        return _horde(1024, d, projections)


def _horde(C: int, d: int, projections: Projections) -> HORDELoss:
    return HORDELoss(BinomialDevianceLoss(), C, EMBEDDING, moment_dim=d, projections=projections)


def held_bytes(module: nn.Module) -> int:
    """Bytes of buffers, and of parameters with their gradients and Adam's two moments."""
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    return 4 * parameters + sum(buffer.nbytes for buffer in module.buffers())


def held_table() -> str:
    """A table of the bytes of HORDE's parts during training."""
    rows = []
    for d in WIDTHS:
        trained, fixed = empty_horde(d, "cascaded"), empty_horde(d, "random")
        held = [held_bytes(part) for part in (trained.moments, trained.embeddings, fixed.moments)]
        images = (held[0] + held[1] - held[2]) / trained.activation_bytes(1, POSITIONS)
        rows.append([f"{d:,}", *(f"{count / 1e6:,.1f}" for count in held), f"{images:,.0f}"])
    header = ["d", "trained (MB)", "their embeddings (MB)", "fixed (MB)", "images"]
    return Table(header, rows).markdown() + "\n"


def figure(method: Comparison, sweeps: Mapping[str, Sweep]) -> bytes:
    """A figure with time above and memory below, a column per variant, and a line per size.

    The axis has multiples of the base point's sizes.
    """
    curves: dict[str, Callable[[Measured], float]] = {
        "time (base point: 1)": lambda point: point.ratio,
        "memory (MB)": lambda point: point.bytes / 1e6,
    }
    count = len(method.candidates)
    drawn = Figure(figsize=(2.4 * max(count, 2) + 0.8, 5.2), layout="constrained")
    panels = drawn.subplots(2, count, sharex=True, sharey="row", squeeze=False)
    for row, (name, curve) in zip(panels, curves.items(), strict=True):
        row[0].set_ylabel(name, fontsize=9)
        for axes, variant in zip(row, method.candidates, strict=True):
            for size, colour, marker in zip(sweeps, COLOURS, MARKERS, strict=False):
                base = method.base[size]
                multiples = [value / base for value in method.grids[size]]
                style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3}
                points = [curve(point) for point in sweeps[size][variant]]
                axes.plot(multiples, points, label=f"{size} ({base:,})", **style)
    for axes, variant in zip(panels[0], method.candidates, strict=True):
        axes.set_title(variant, fontsize=9)
    return svg(drawn, "size, as a multiple of the base point's", method.name)


# --------------------------------------------------------------------------------------------- page


def main(argv: Sequence[str] | None = None) -> int:
    options = page_parser("benchmarks.speed.size_pages", __doc__).parse_args(argv)
    torch.manual_seed(0)
    tiny, device = options.tiny, current_device()
    command = f"python -m benchmarks.speed.size_pages{' --tiny' * tiny} --output docs/costs"
    found, figures = [INTRODUCTION.format(origin=origin(command, device))], {}
    for build in METHODS:
        method = build(tiny, device)
        points, sweeps = measure_over(method, tiny=tiny)
        file = f"{build.__name__}.svg"
        shown = f"{getattr(options.output, 'name', 'PAGE')}/{file}"
        found.append(f"### {method.name}\n\n{method.table(points, sweeps)}")
        found.append(f"![Time and memory of {method.name} over its sizes]({shown})\n")
        figures[file] = figure(method, sweeps)
    found += [CROSSOVER, held_table(), STEPS]
    found += [section(horde_steps(N, tiny, device), tiny) for N in (40, 8)]
    found.append(REAL)
    for trunk in ("googlenet", "resnet50"):
        found.append(
            section(replace(network_steps(trunk, 8, tiny, device), name=trunk, rounds=2), tiny)
        )
    text = "\n".join(found)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for file, drawn in figures.items():
            replace_file(options.output / file, drawn)
        replace_file(options.output.with_suffix(".md"), text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
