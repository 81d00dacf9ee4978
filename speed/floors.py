"""The least time that a loss can add to a training step: its operations and bytes, at the rates of the card.

Counted are matrix products, at the rate of a large product; what passes over large tensors must read and write, at
the rate of a large copy; and 28 bytes for each parameter that Adam updates (it reads four numbers and writes
three). Launches, and tensors of the size of a batch's embeddings, are not counted.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.reporting.table import Table
from speed.case import Case
from speed.losses import ALONE, Sizes
from speed.measuring import Comparison, matmul_precision

ADAM = 28

PRECISIONS = {
    "bfloat16": (torch.bfloat16, "highest"),
    "TF32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}
"""Type of the matrices, and torch's precision of products in float32."""

Work = Mapping[str, float]
"""Operations by precision (a multiplication and an addition are two), and bytes read and written, as "bytes"."""


def measure_rates(case: Case) -> dict[str, float]:
    """Seconds of each kind of work, by products of 8192 x 8192 and a copy of a gibibyte; and tell them."""
    n, numbers, launches = (64, 2**10, 10) if case.tiny else (8192, 2**28, 2000)

    def least(run: Callable[[], object], calls: int) -> float:
        comparison = Comparison("", "", {"": run}, rounds=3, memory=None, calls=calls)
        return min(comparison.measure(case.tiny)[0][""])

    seconds, rows = {}, []
    for name, (dtype, precision) in PRECISIONS.items():
        a, b, out = torch.randn(3, n, n, device=case.device).to(dtype).unbind()
        with matmul_precision(precision):
            seconds[name] = least(partial(torch.mm, a, b, out=out), 5) / (2 * n**3)
        rows.append([f"matrix products, {name}", f"{1e-12 / seconds[name]:,.4g} TFLOP/s"])
    source, one = torch.ones(numbers, device=case.device), torch.ones(1, device=case.device)
    seconds["bytes"] = least(partial(torch.empty_like(source).copy_, source), 5) / (8 * numbers)
    rows.append(["copy, read and written", f"{1e-9 / seconds['bytes']:,.0f} GB/s"])
    launch = least(partial(one.add_, 1), launches)
    rows.append(["launches of small kernels", f"{launch * 1e6:.1f} µs each"])
    case.tell(Table(["this card", "rate"], rows).markdown())
    return seconds


def projected(sizes: Sizes, *, trained: bool, half: bool = False) -> Work:
    """HORDE's moments by matrices, stored.

    Products: x W_k, dA_k W_k^T and, if trained, x^T dA_k. Passes: forward one over the projections A_k, backward
    one that reads them and writes their gradients. Fixed matrices of one byte are made floating twice. Trained
    ones, and the embeddings of the orders, are Adam's.
    """
    rows, number = sizes.N * sizes.P, 2 if half else 4
    operations = (2 + trained) * 2 * rows * sizes.C * sizes.d * sizes.K
    matrices = sizes.K * sizes.C * sizes.d
    moved = 3 * sizes.K * rows * sizes.d * number
    if trained:
        moved += ADAM * (matrices + (sizes.K - 1) * sizes.d * sizes.E)
    else:
        moved += 2 * matrices * (1 + number)
    return {"bfloat16" if half else "TF32": operations, "bytes": moved}


def sketched(sizes: Sizes) -> Work:
    """HORDE's moments by sketches: passes over features x, sketches s of d and transforms t of d + 2 numbers.

    Each order reads x, writes, transforms (reads s, writes t) and sums (reads t) forward; backward it reads t,
    writes and transforms back (writes t, reads t, writes s) and gathers (reads s). Besides, x is divided by its
    size (read, written) and its gradient is written.
    """
    x, s, t = (4 * sizes.N * sizes.P * width for width in (sizes.C, sizes.d, sizes.d + 2))
    return {"bytes": sizes.K * (x + 4 * s + 5 * t) + 3 * x}


def joint(sizes: Sizes) -> Work:
    """JRD: products of rows of three representations, forward and backward, and of embeddings and class weights."""
    N, C, E, classes = sizes.N, sizes.C, sizes.E, sizes.classes
    products = 2 * 2 * N**2 * (C + E + classes) + 3 * 2 * N * E * classes
    return {"TF32": products, "bytes": ADAM * E * classes + 12 * N * C}


FLOORS: Mapping[str, Callable[[Sizes], Work]] = {
    ALONE: lambda _: {},
    "HORDE, sketch (default)": lambda s: sketched(s.default()),
    "HORDE, random": partial(projected, trained=False),
    "HORDE, cascaded": partial(projected, trained=True),
    'HORDE, cascaded, matmul_dtype="bfloat16"': partial(projected, trained=True, half=True),
    "JRD": joint,
    # The linear layer once more, on detached features, forward and backward.
    "energy confusion": lambda s: {"bfloat16": 4 * s.N * s.C * s.E, "bytes": 16 * s.N * s.E},
    # Reads and writes the pooled features a few times, forward and backward.
    "VEM": lambda s: {"bytes": 6 * 4 * s.N * s.C},
}
"""What losses in place of binomial deviance add; all contain it, except for JRD."""
