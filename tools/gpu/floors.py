"""The least time that a loss can add to a training step: its operations and bytes, at the rates of the card.

Counted are matrix products, at the rate of a large product; what passes over large tensors must read and write, at
the rate of a large copy; and 28 bytes for each parameter that Adam updates (it reads four numbers and writes
three). Launches, and tensors of the size of a batch's embeddings, are not counted.
"""

from dataclasses import dataclass

from tools.gpu.networks import Sizes
from tools.gpu.timing import Rates

ADAM = 28


@dataclass(frozen=True)
class Work:
    """Operations of matrix products in TF32 and bfloat16, and bytes read and written besides."""

    tf32: float = 0
    bfloat16: float = 0
    moved: float = 0

    def seconds(self, rates: Rates) -> float:
        products = self.tf32 / rates.products["TF32"] + self.bfloat16 / rates.products["bfloat16"]
        return products + self.moved / rates.copy


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
    return Work(moved=moved, **{"bfloat16" if half else "tf32": operations})


def sketched(sizes: Sizes) -> Work:
    """HORDE's moments by sketches: passes over features x, sketches s of d and transforms t of d + 2 numbers.

    Each order reads x, writes, transforms (reads s, writes t) and sums (reads t) forward; backward it reads t,
    writes and transforms back (writes t, reads t, writes s) and gathers (reads s). Besides, x is divided by its
    size (read, written) and its gradient is written.
    """
    x, s, t = (4 * sizes.N * sizes.P * width for width in (sizes.C, sizes.d, sizes.d + 2))
    return Work(moved=sizes.K * (x + 4 * s + 5 * t) + 3 * x)


def joint(sizes: Sizes) -> Work:
    """JRD: products of rows of three representations, forward and backward, and of embeddings and class weights."""
    pairs = 2 * 2 * sizes.N**2 * (sizes.C + sizes.E + sizes.classes)
    return Work(
        tf32=pairs + 3 * 2 * sizes.N * sizes.E * sizes.classes,
        moved=ADAM * sizes.E * sizes.classes + 12 * sizes.N * sizes.C,
    )


def energy_confusion(sizes: Sizes) -> Work:
    """Energy confusion: the linear layer once more, on detached features, forward and backward."""
    return Work(bfloat16=2 * 2 * sizes.N * sizes.C * sizes.E, moved=16 * sizes.N * sizes.E)


def variance(sizes: Sizes) -> Work:
    """VEM: reads and writes the pooled features a few times, forward and backward."""
    return Work(moved=6 * 4 * sizes.N * sizes.C)
