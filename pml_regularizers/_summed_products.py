r"""Products of projections, summed over positions: the arithmetic of high-order moments.

    A_k = x W_k,   phi_k = A_1 * ... * A_k,   s_k = sum of phi_k over an image's positions

Column j of s_k needs only column j of the matrices. So a block of columns goes through all orders while its
projections are in cache: forwards as above, and backwards, with D_k the gradient of phi_k and g_k that of s_k:

    D_K = g_K,   D_k = g_k + A_{k+1} * D_{k+1},   dA_k = phi_{k-1} * D_k,   dA_1 = D_1
    dx = sum_k dA_k W_k^T,   dW_k = x^T dA_k

The backward pass reads stored projections or computes them again; plain autograd holds nearly two tensors of
their size per order.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from . import _triton_products

Activations = Literal["store", "recompute", "autograd"]
Kernels = Literal["auto", "torch", "triton"]

BLOCK = 2**20
"""Numbers of a projection per block: 4 MiB, which a CPU caches and which costs little memory."""
CHUNK = 2**18
"""Numbers of a block that go through all orders at once, a mebibyte, if many operations do it."""
GPU_BLOCK = 2**23
"""Numbers per block on a GPU if projections are stored: it is slow on narrow matrices."""


def summed_products(
    x: Tensor,
    projections: Sequence[Tensor],
    *,
    first: int = 2,
    dtype: torch.dtype | None = None,
    activations: Activations = "store",
    kernels: Kernels = "auto",
) -> Tensor:
    """Return s_first .. s_K.

    Args:
        x: (N, P, C), P features of C channels for each of N images, in float32 or float64.
        projections: W_1 .. W_K, K >= 2, each (C, d); int8 matrices have no gradient.
        first: Lowest order to return.
        dtype: Precision of the matrix products; default: x's. `torch.bfloat16` rounds features, matrices and
            projections to 8 bits; everything else stays in x's dtype.
        activations: "store" the projections for the backward pass, "recompute" them there, or "autograd": only
            differentiable operations. "autograd" also runs under `torch.compile` and `torch.func`, and for the
            gradient of a gradient; choose it yourself for `torch.autograd.grad` with `is_grads_batched`.
        kernels: "triton": one kernel between the matrix products; "torch": a few operations; "auto": Triton on
            CUDA devices if it is installed.

    Returns:
        (K - first + 1, N, d), in x's dtype.

    Raises:
        ValueError: unless 2 <= first <= K.
    """
    if not 2 <= first <= len(projections):
        raise ValueError(
            f"first: expected an order from 2 to {len(projections)}, the number of projections, got {first}"
        )
    dtype = dtype or x.dtype
    if activations == "autograd" or torch.compiler.is_compiling() or is_transformed():
        return _differentiable(x, projections, first, dtype)
    fused = kernels == "triton" or (
        kernels == "auto" and x.device.type == "cuda" and _triton_products.available
    )
    trained = any(tensor.requires_grad for tensor in (x, *projections))
    store = activations == "store" and trained and torch.is_grad_enabled()
    options = first, dtype, store, fused
    result: Tensor = _SummedProducts.apply(options, x.contiguous(), *projections)
    return result


def kept_projections(order: int, activations: Activations) -> int:
    """Number of tensors of a projection's size, (N, P, d), that live from the forward to the backward pass."""
    return {"store": order, "recompute": 0, "autograd": 2 * (order - 1)}[activations]


def _differentiable(
    x: Tensor, projections: Sequence[Tensor], first: int, dtype: torch.dtype
) -> Tensor:
    rows = x.to(dtype)
    factors = [(rows @ projection.to(dtype)).to(x.dtype) for projection in projections]
    phi = factors[0]
    sums = []
    for k, factor in enumerate(factors[1:], start=2):
        phi = phi * factor  # eqs. 4, 6
        if k >= first:
            sums.append(phi.sum(dim=1))  # eq. 8, its sum
    return torch.stack(sums)


class _SummedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: tuple[int, torch.dtype, bool, bool], x: Tensor, *projections: Tensor
    ) -> Tensor:
        first, dtype, store, fused = options
        add_up = _triton_products.add_up if fused else _add_up
        rows = x.to(dtype).flatten(0, 1)
        order, width = len(projections), projections[0].shape[1]
        sums = x.new_empty(order - first + 1, len(x), width)
        factors, stored = None, []
        for columns in _blocks(rows, width, store):
            factors = _project(rows, projections, columns, None if store else factors)
            add_up(_by_image(factors, x), sums[:, :, columns])
            if store:
                stored.append(factors)
        ctx.options = options
        ctx.save_for_backward(x, *projections, *stored)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, dtype, _, fused = ctx.options
        _, *needed = ctx.needs_input_grad
        x, *others = ctx.saved_tensors
        projections, stored = others[: len(needed) - 1], others[len(needed) - 1 :]
        if torch.is_grad_enabled() or is_transformed():  # for the gradient of this gradient
            return None, *_differentiable_gradients(
                [x, *projections], needed, gradient, first, dtype
            )
        share_out = _triton_products.share_out if fused else _share_out
        gradient = gradient.contiguous()
        rows = x.to(dtype).flatten(0, 1)
        dx = x.new_zeros(len(rows), x.shape[2]) if needed[0] else None
        dws = [
            torch.empty_like(projection) if need else None
            for projection, need in zip(projections, needed[1:], strict=True)
        ]
        factors = d_factors = None
        for block, columns in enumerate(_blocks(rows, gradient.shape[2], bool(stored))):
            factors = stored[block] if stored else _project(rows, projections, columns, factors)
            if not stored:
                d_factors = factors
            elif d_factors is None or d_factors.shape != factors.shape:
                d_factors = torch.empty_like(factors)
            share_out(_by_image(factors, x), gradient[:, :, columns], _by_image(d_factors, x))
            for projection, dw, d_factor in zip(projections, dws, d_factors, strict=True):
                if dx is not None:
                    _add_product(d_factor, projection[:, columns].to(dtype).T, dx)
                if dw is not None:
                    _write_product(rows.T, d_factor, dw[:, columns])
        return None, None if dx is None else dx.view_as(x), *dws


def _blocks(rows: Tensor, width: int, store: bool) -> Iterator[slice]:
    """Slices of columns; their widths are multiples of 128."""
    numbers = GPU_BLOCK if store and rows.device.type == "cuda" else BLOCK
    step = max(numbers // max(len(rows), 1) // 128, 1) * 128
    for start in range(0, width, step):
        yield slice(start, min(start + step, width))


def _project(
    rows: Tensor, projections: Sequence[Tensor], columns: slice, out: Tensor | None
) -> Tensor:
    """A_1 .. A_K of a block of columns, in `out` if it fits: (K, N P, b)."""
    shape = (len(projections), len(rows), columns.stop - columns.start)
    if out is None or out.shape != shape:
        out = rows.new_empty(shape)
    for factor, projection in zip(out, projections, strict=True):
        torch.mm(rows, projection[:, columns].to(rows.dtype), out=factor)
    return out


def _by_image(factors: Tensor, x: Tensor) -> Tensor:
    """(K, N P, b) -> (K, N, P, b), with x of (N, P, C)."""
    order, _, columns = factors.shape
    return factors.view(order, *x.shape[:2], columns)


def _add_up(factors: Tensor, sums: Tensor) -> None:
    """Fill sums (O, N, b), the last O orders, from factors (K, N, P, b)."""
    first = len(factors) - len(sums)
    phi = factors[0].to(sums.dtype)
    buffer = torch.empty_like(phi)
    for k, factor in enumerate(factors[1:], start=1):
        phi = torch.mul(phi, factor, out=buffer)  # eqs. 4, 6
        if k >= first:
            torch.sum(phi, dim=1, out=sums[k - first])  # eq. 8, its sum


def _share_out(factors: Tensor, gradient: Tensor, out: Tensor) -> None:
    """Fill out (K, N, P, b), which may be `factors`, with their gradient, from that of the sums (O, N, b)."""
    order, count, positions, columns = factors.shape
    first = order - len(gradient)
    step = max(CHUNK // (positions * columns), 1)
    for start in range(0, count, step):
        part = slice(start, start + step)
        parts = factors[:, part].to(gradient.dtype)
        phis = list(accumulate(parts[:-1], torch.mul))
        rest = gradient[-1, part].unsqueeze(1)  # D_K
        for k in range(order - 1, 0, -1):
            d_factor, rest = rest * phis[k - 1], rest * parts[k]
            if k > first:
                rest += gradient[k - 1 - first, part].unsqueeze(1)  # D_k
            out[k, part] = d_factor
        out[0, part] = rest


def _add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


def _write_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _differentiable_gradients(
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    gradient: Tensor,
    first: int,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    with torch.enable_grad():
        # Aliases, because an input may depend on another: gradients must not flow from one into the other.
        x, *projections = aliases = [tensor.view_as(tensor) for tensor in inputs]
        sums = _differentiable(x, projections, first, dtype)
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need]
    found = iter(torch.autograd.grad(sums, wanted, gradient, create_graph=True))
    return [next(found) if need else None for need in needed]


def is_transformed() -> bool:
    """True if a transformation of `torch.func` is under way, which does not support `out=`."""
    return bool(getattr(torch._C, "_are_functorch_transforms_active", bool)())
