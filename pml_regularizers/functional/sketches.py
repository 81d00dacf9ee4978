r"""Circular convolutions of count sketches, summed over positions: the arithmetic of sketched moments.

    S_k   = C_k x                    count sketch: a bucket of C_k adds up some entries of x, each with a sign
    phi_k = S_1 (*) ... (*) S_k      (*): circular convolution (Pham and Pagh, KDD 2013)
    s_k   = sum of phi_k over an image's positions

The discrete Fourier transform turns convolutions into products: with A_k the transform of S_k,

    s_k = inverse transform of the sum over positions of A_1 * ... * A_k

Backwards, let G_k be the conjugate transform of s_k's gradient and E_k that of the gradient of phi_k:

    E_K = G_K,   E_k = G_k + A_{k+1} * E_{k+1},   F_k = A_1 * ... * A_{k-1} * E_k,   F_1 = E_1

The inverse transform of F_k is the gradient of S_k with its entries in reverse, j at -j modulo d. So one
conjugate per image serves all positions.

A table describes C_k: row j of d holds c for each channel c, counted from 1, that falls into bucket j, -c if it
does so with a minus sign, and 0 in the places that are left. Every channel has one place in it, so sketching is
gathering, as is its gradient: no result depends on the order in which threads run.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .products import is_transformed

BLOCK = 2**17
"""Numbers of a sketch per block of positions: half a mebibyte, so that a CPU caches those of all orders."""
GPU_BLOCK = 2**23
"""The same on a GPU, which is slow on few numbers."""


def draw_table(table: Tensor, channels: int) -> None:
    """Fill a table, C integers or more, at random: the places without replacement, and the signs."""
    signs = torch.empty(channels, device=table.device).bernoulli_(0.5).mul_(2).sub_(1)
    numbers = torch.arange(1, channels + 1, device=table.device)
    places = torch.randperm(table.numel(), device=table.device)[:channels]
    table.zero_().view(-1)[places] = (signs * numbers).to(table.dtype)


def fast_width(width: int) -> int:
    """The least number from `width` on whose prime factors are 2, 3, 5 or 7, for which transforms are fast."""
    while pow(210, 64, width):
        width += 1
    return width


def summed_convolutions(
    x: Tensor, tables: Sequence[Tensor], size: Tensor | None = None, checkpoint: bool = False
) -> Tensor:
    """Return s_2 .. s_K of x (N, P, C): (K - 1, N, d), in x's dtype, float32 or float64.

    Args:
        tables: Tables of C_1 .. C_K, K >= 2, each (d, R), as above, d R >= C.
        size: (N, 1), constants by which the features of each image are divided; default: 1.
        checkpoint: Transform again in the backward pass instead of storing the transforms.
    """
    if len(x) == 0:  # torch refuses transforms of nothing
        return x.new_zeros(len(tables) - 1, 0, tables[0].shape[0]) * x.sum()
    size = x.new_ones(1, 1).expand(len(x), 1) if size is None else size.detach()
    size = size.unsqueeze(2)
    if torch.compiler.is_compiling() or is_transformed():
        table = _stack(tables)
        phis = list(accumulate(_factors(x, size, table, _sources(table, x)).unbind(2), torch.mul))
        return _inverse(torch.stack([phi.sum(dim=1) for phi in phis[1:]]), table.shape[2])
    store = torch.is_grad_enabled() and x.requires_grad and not checkpoint
    result: Tensor = _SummedConvolutions.apply(store, x, size, *tables)
    return result


class _SummedConvolutions(torch.autograd.Function):
    """All orders in one call of an operation, where it can be: a GPU's launches take longer than their work."""

    @staticmethod
    def forward(ctx: Any, store: bool, x: Tensor, size: Tensor, *tables: Tensor) -> Tensor:
        table = _stack(tables)
        order, _, buckets = table.shape
        shape = order - 1, len(x), buckets // 2 + 1
        sums = x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.complex64))
        stored, sources = [], _sources(table, x)
        for block in _blocks(x, buckets):
            factors = _factors(x[block], size[block[0]], table, sources)
            phi, *others = factors.unbind(2)
            for total, factor in zip(sums[:, block[0]], others, strict=True):
                phi = phi * factor
                total += phi.sum(dim=1)
            stored += [factors] if store else []
        ctx.save_for_backward(x, size, *tables, *stored)
        return _inverse(sums, buckets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        order, buckets = len(gradient) + 1, gradient.shape[2]
        x, size, *others = ctx.saved_tensors
        table, stored = _stack(others[:order]), others[order:]
        if torch.is_grad_enabled():  # for the gradient of this one: transforms as functions of x
            stored = []
        sources, targets = None if stored else _sources(table, x), _targets(table, x)
        # In reverse, j at -j modulo d: the transform is the conjugate.
        conjugates = torch.fft.rfft(gradient.flip(2).roll(1, 2)).unsqueeze(2)
        dx = gradient.new_empty(x.shape)
        for index, block in enumerate(_blocks(x, buckets)):
            sizes = size[block[0]]
            factors = _factors(x[block], sizes, table, sources) if sources else stored[index]
            A = factors.unbind(2)
            phis = list(accumulate(A[:-1], torch.mul))
            G = conjugates[:, block[0]]
            E, Fs = G[-1], []
            for k in range(len(A) - 1, 0, -1):
                Fs.append(phis.pop() * E)
                E = A[k] * E
                if k > 1:
                    E += G[k - 2]
            del factors, A  # of the size of the block, as those below
            F = torch.stack([E, *reversed(Fs)], dim=2)
            del E, Fs
            parts = _gather(_inverse(F, buckets).flatten(2), *targets)
            total = parts.view(*F.shape[:3], -1).sum(dim=2)
            dx[block] = total / sizes
        return None, dx, None, *[None] * order


def _blocks(x: Tensor, buckets: int) -> Iterator[tuple[slice, slice]]:
    """Slices of images and positions: whole images, or a part of one image."""
    numbers = GPU_BLOCK if x.is_cuda else BLOCK
    images, positions, _ = x.shape
    rows = min(max(numbers // buckets, 1), positions)
    count = max(numbers // (buckets * rows), 1) if rows == positions else 1
    for image in range(0, images, count):
        for position in range(0, positions, rows):
            yield slice(image, image + count), slice(position, position + rows)


def _factors(x: Tensor, size: Tensor, table: Tensor, sources: tuple[Tensor, Tensor]) -> Tensor:
    """A_1 .. A_K of x (n, p, C): (n, p, K, d // 2 + 1)."""
    sketch = _gather((x / size).contiguous(), *sources).view(*x.shape[:2], *table.shape)
    sketch = sketch.sum(dim=3) if table.shape[1] > 1 else sketch.squeeze(3)
    return torch.fft.rfft(sketch)  # type: ignore[no-any-return]


def _stack(tables: Sequence[Tensor]) -> Tensor:
    """Tables (d, R) of all orders: (K, R, d)."""
    return torch.stack([table.T for table in tables])


def _sources(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Channel of each place of a table (K, R, d), and its sign."""
    places = table.view(-1)
    # A place without a channel takes any, with the sign 0; torch 2.4's vmap takes no other integers than long.
    return (places.abs() - 1).clamp(min=0).long(), places.sign().to(x.dtype)


def _targets(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Bucket j of each order's channels, as -j modulo d, in the row of all orders' buckets, and its sign."""
    (order, _, buckets), places = table.shape, table.flatten(1)
    rows, numbers = torch.arange(order, device=x.device).unsqueeze(1), places.abs().long()
    index = torch.zeros(order, x.shape[2] + 1, dtype=torch.long, device=x.device)
    index[rows, numbers] = torch.arange(places.numel(), device=x.device).view_as(places)
    signs = x.new_zeros(index.shape)  # stays 0 for a channel without a place
    signs[rows, numbers] = places.sign().to(x.dtype)
    return (-index[:, 1:] % buckets + rows * buckets).flatten(), signs[:, 1:].flatten()


def _gather(x: Tensor, index: Tensor, signs: Tensor) -> Tensor:
    """Entries (n, p, M) of x (n, p, c), each with a sign; as matrices, since torch is slow on other shapes."""
    rows = x.flatten(0, 1).index_select(1, index).mul_(signs)
    return rows.view(*x.shape[:2], len(index))


def _inverse(transforms: Tensor, buckets: int) -> Tensor:
    return torch.fft.irfft(transforms, n=buckets)  # type: ignore[no-any-return]
