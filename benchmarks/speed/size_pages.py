"""Measures time and memory: each method over its sizes, fixed beside trained projections, and steps of networks.

    python -m benchmarks.speed.size_pages [--tiny] [--output docs/costs]

This takes some minutes on two cores. It writes PAGE.md, and the figures into a folder PAGE.
"""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.records import replace_file
from benchmarks.speed.arguments import page_parser

if TYPE_CHECKING:
    from benchmarks.speed.measuring import Comparison, Measured, Sweep

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


def main(argv: Sequence[str] | None = None) -> int:
    options = page_parser("benchmarks.speed.size_pages", __doc__).parse_args(argv)

    import torch  # not for --help

    from benchmarks.speed import sizes
    from benchmarks.speed.measuring import current_device, measure, measure_over, origin
    from benchmarks.speed.steps import network_steps

    torch.manual_seed(0)
    tiny, device = options.tiny, current_device()
    command = f"python -m benchmarks.speed.size_pages{' --tiny' * tiny} --output docs/costs"
    found, figures = [INTRODUCTION.format(origin=origin(command, device))], {}
    for name in sizes.METHODS:
        method = getattr(sizes, name)(tiny, device)
        points, sweeps = measure_over(method, tiny=tiny)
        table = method.table(points, sweeps)
        file = f"{getattr(options.output, 'name', 'PAGE')}/{name}.svg"
        shown = f"![Time and memory of {method.name} over its sizes]({file})"
        found.append(f"### {method.name}\n\n{_filled(table)}\n{shown}\n")
        figures[f"{name}.svg"] = figure(method, sweeps)
    found += [CROSSOVER, held_table(), STEPS]
    steps = [sizes.horde_steps(N, tiny, device) for N in (40, 8)]
    found += [f"### {step.name}\n\n{step.table(measure(step, tiny=tiny))}" for step in steps]
    found.append(REAL)
    for trunk in ("googlenet", "resnet50"):
        comparison = replace(network_steps(trunk, 8, tiny, device), rounds=2)
        found.append(f"### {trunk}\n\n{comparison.table(measure(comparison, tiny=tiny))}")
    text = "\n".join(found)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for file, svg in figures.items():
            replace_file(options.output / file, svg)
        replace_file(options.output.with_suffix(".md"), text.encode())
    return 0


def _filled(table: str) -> str:
    """The table, with the words above it folded."""
    words, rows = table.split("\n\n", 1)
    return f"{textwrap.fill(words, 116)}\n\n{rows}"


def held_table() -> str:
    """A table of the bytes of HORDE's parts during training."""
    from benchmarks.reporting import Table
    from benchmarks.speed.sizes import POSITIONS, empty_horde, held_bytes

    rows = []
    for d in WIDTHS:
        trained, fixed = empty_horde(d, "cascaded"), empty_horde(d, "random")
        held = [held_bytes(part) for part in (trained.moments, trained.embeddings, fixed.moments)]
        images = (held[0] + held[1] - held[2]) / trained.activation_bytes(1, POSITIONS)
        rows.append([f"{d:,}", *(f"{count / 1e6:,.1f}" for count in held), f"{images:,.0f}"])
    header = ["d", "trained (MB)", "their embeddings (MB)", "fixed (MB)", "images"]
    return Table(header, rows).markdown() + "\n"


def figure(method: "Comparison", sweeps: Mapping[str, "Sweep"]) -> bytes:
    """A figure with time above and memory below, a column per variant, and a line per size.

    The axis has multiples of the base point's sizes.
    """
    from matplotlib.figure import Figure

    from benchmarks.reporting import COLOURS, MARKERS, svg

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


if __name__ == "__main__":
    sys.exit(main())
