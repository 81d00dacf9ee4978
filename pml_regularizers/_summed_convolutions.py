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
gathering: the sums have a fixed order, and the gradient is gathered, too. No result depends on the order in which
threads run.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ._precision import integer_fault
from ._summed_products import Activations, is_transformed

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


def table_fault(table: Tensor, channels: int) -> str | None:
    """The fault of a table that should hold each of 1 .. C once, with either sign; None if it does."""
    if (fault := integer_fault(table)) is not None:
        return fault
    if (found := int(table.count_nonzero())) != channels:
        return (
            f"expected a table of {channels} channels, got one of {found}; in_channels must match"
        )
    numbers = table.abs().flatten().sort().values[-channels:]
    if torch.equal(numbers, torch.arange(1, channels + 1).to(numbers)):
        return None
    return (
        f"expected each of the channels 1 to {channels} once, with either sign, got others: the table is "
        "damaged; take it from another copy, or draw it anew (reset_parameters())"
    )


def summed_convolutions(
    x: Tensor,
    tables: Sequence[Tensor],
    *,
    size: Tensor | None = None,
    activations: Activations = "store",
) -> Tensor:
    """Return s_2 .. s_K.

    Args:
        x: (N, P, C), P features of C channels for each of N images, in float32 or float64; a transposed map works
            as well.
        tables: Tables of C_1 .. C_K, K >= 2, each (d, R), as above, d R >= C.
        size: (N, 1), constants by which the features of each image are divided; default: 1.
        activations: "store" the transforms for the backward pass, "recompute" them there, or "autograd": as in
            `summed_products`.

    Returns:
        (K - 1, N, d), in x's dtype.
    """
    if len(x) == 0:  # torch refuses transforms of nothing
        return x.new_zeros(len(tables) - 1, 0, tables[0].shape[0]) * x.sum()
    size = x.new_ones(1, 1).expand(len(x), 1) if size is None else size.detach()
    size = size.unsqueeze(2)
    if activations == "autograd" or torch.compiler.is_compiling() or is_transformed():
        return _differentiable(x, size, tables)
    store = activations == "store" and x.requires_grad and torch.is_grad_enabled()
    result: Tensor = _SummedConvolutions.apply(store, x, size, *tables)
    return result


def _differentiable(x: Tensor, size: Tensor, tables: Sequence[Tensor]) -> Tensor:
    phis = list(accumulate(_factors(x, size, tables), torch.mul))
    return _inverse(torch.stack([phi.sum(dim=1) for phi in phis[1:]]), tables[0].shape[0])


class _SummedConvolutions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: bool, x: Tensor, size: Tensor, *tables: Tensor) -> Tensor:
        buckets = tables[0].shape[0]
        shape = len(tables) - 1, len(x), buckets // 2 + 1
        dtype = torch.promote_types(x.dtype, torch.complex64)
        sums = torch.zeros(shape, dtype=dtype, device=x.device)
        stored = []
        for block in _blocks(x, buckets):
            factors = _factors(x[block], size[block[0]], tables)
            phi = factors[0]
            for total, factor in zip(sums[:, block[0]], factors[1:], strict=True):
                phi = phi * factor
                total += phi.sum(dim=1)
            if store:
                stored += factors
        ctx.save_for_backward(x, size, *tables, *stored)
        return _inverse(sums, buckets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        order, buckets = len(gradient) + 1, gradient.shape[2]
        x, size, *others = ctx.saved_tensors
        tables, stored = others[:order], others[order:]
        if torch.is_grad_enabled() or is_transformed():  # for the gradient of this gradient
            dx = _differentiable_gradient(x, size, tables, gradient)
            return None, dx, None, *[None] * order
        targets = [_targets(table, x) for table in tables]
        # In reverse, j at -j modulo d: the transform is the conjugate.
        conjugates = torch.fft.rfft(gradient.flip(2).roll(1, 2)).unsqueeze(2)
        dx = torch.empty_like(x)
        for number, block in enumerate(_blocks(x, buckets)):
            if stored:
                factors = stored[number * order : (number + 1) * order]
            else:
                factors = _factors(x[block], size[block[0]], tables)
            phis = list(accumulate(factors[:-1], torch.mul))
            G = conjugates[:, block[0]]
            E, total = G[-1], torch.zeros((), dtype=x.dtype, device=x.device)
            for k in range(order - 1, 0, -1):
                total = total + _gather(_inverse(phis[k - 1] * E, buckets), *targets[k])
                E = factors[k] * E
                if k > 1:
                    E += G[k - 2]
            total += _gather(_inverse(E, buckets), *targets[0])
            torch.div(total, size[block[0]], out=dx[block])
        return None, dx, None, *[None] * order


def _blocks(x: Tensor, buckets: int) -> Iterator[tuple[slice, slice]]:
    """Slices of images and positions: whole images, or a part of one image."""
    numbers = GPU_BLOCK if x.device.type == "cuda" else BLOCK
    images, positions, _ = x.shape
    rows = min(max(numbers // buckets, 1), positions)
    count = max(numbers // (buckets * rows), 1) if rows == positions else 1
    for image in range(0, images, count):
        for position in range(0, positions, rows):
            yield slice(image, image + count), slice(position, position + rows)


def _factors(x: Tensor, size: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """A_1 .. A_K of x (n, p, C): (n, p, d // 2 + 1)."""
    x = (x / size).contiguous()
    return [_transform(x, table) for table in tables]


def _transform(x: Tensor, table: Tensor) -> Tensor:
    sketch = _gather(x, *_sources(table.T.reshape(-1), x.dtype))
    if table.shape[1] > 1:
        sketch = sketch.view(*x.shape[:2], *table.T.shape).sum(dim=2)
    transform: Tensor = torch.fft.rfft(sketch)
    return transform


def _sources(table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Channel and sign of each place of a table; a place without a channel has any channel and the sign 0."""
    channels = (table.abs() - 1).clamp(min=0).long()  # torch 2.4's vmap takes no other integers
    return channels, table.sign().to(dtype)


def _targets(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Bucket j of each channel, as -j modulo d, and its sign."""
    (channels, buckets), table = (x.shape[2], table.shape[0]), table.T.reshape(-1)
    numbers = table.abs().long()
    place = torch.zeros(channels + 1, dtype=torch.long, device=x.device)
    place[numbers] = torch.arange(len(table), device=x.device)
    signs = x.new_zeros(channels + 1)  # stays 0 for a channel without a place
    signs[numbers] = table.sign().to(x.dtype)
    return -place[1:] % buckets, signs[1:]


def _gather(x: Tensor, index: Tensor, signs: Tensor) -> Tensor:
    """Entries (n, p, M) of x (n, p, c), each with a sign; as matrices, since torch is slow on other shapes."""
    rows = x.flatten(0, 1).index_select(1, index).mul_(signs)
    return rows.view(*x.shape[:2], len(index))


def _inverse(transforms: Tensor, buckets: int) -> Tensor:
    result: Tensor = torch.fft.irfft(transforms, n=buckets)
    return result


def _differentiable_gradient(
    x: Tensor, size: Tensor, tables: Sequence[Tensor], gradient: Tensor
) -> Tensor:
    with torch.enable_grad():
        alias = x.view_as(x)  # x may depend on other inputs, whose gradients are not computed here
        sums = _differentiable(alias, size, tables)
    (dx,) = torch.autograd.grad(sums, alias, gradient, create_graph=True)
    return dx
