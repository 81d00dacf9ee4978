r"""Products of projections, summed over positions: the arithmetic of high-order moments.

    A_k = x W_k,   phi_k = A_1 * ... * A_k,   s_k = sum of phi_k over an image's positions

Backwards, with D_k the gradient of phi_k and g_k that of s_k:

    D_K = g_K,   D_k = g_k + A_{k+1} * D_{k+1},   dA_k = phi_{k-1} * D_k,   dA_1 = D_1
    dx = sum_k dA_k W_k^T,   dW_k = x^T dA_k
"""

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from .precision import without_autocast

BLOCK = 2**20
"""Numbers of a projection per block of columns: 4 MiB in float32, which a CPU caches."""
GPU_BLOCK = 2**25
"""The same on a GPU, which is slow on narrow matrices: 128 MiB. Beyond it, an H200 gained nothing (docs/gpu.md)."""


def summed_products(
    x: Tensor,
    matrices: Sequence[Tensor],
    dtype: torch.dtype | None = None,
    checkpoint: bool = False,
) -> Tensor:
    """Return s_2 .. s_K of x (N, P, C): (K - 1, N, d), in x's dtype.

    Args:
        matrices: W_1 .. W_K, K >= 2, each (C, d); those of int8 have no gradient.
        dtype: Precision of the matrix products and of the stored projections. Default: x's.
        checkpoint: Project again in the backward pass, instead of storing the projections.
    """
    dtype = dtype or x.dtype
    if torch.compiler.is_compiling() or is_transformed():
        return _forward(x, matrices, dtype)[0]
    options = dtype, torch.is_grad_enabled() and not checkpoint
    width = (GPU_BLOCK if x.is_cuda else BLOCK) // max(x.shape[0] * x.shape[1], 1) // 128 * 128
    blocks = zip(*(torch.split(W, max(width, 128), dim=1) for W in matrices), strict=True)
    return torch.cat([_Block.apply(options, x, *block) for block in blocks], dim=2)


def is_transformed() -> bool:
    """True if a transformation of `torch.func` is under way, which needs differentiable operations."""
    return bool(torch._C._are_functorch_transforms_active())


def _forward(
    x: Tensor, matrices: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The sums, and A_1 .. A_K."""
    rows = x.to(dtype)
    factors = [rows @ W.to(dtype) for W in matrices]
    phis = accumulate((A.to(x.dtype) for A in factors), torch.mul)  # eqs. 4, 6
    return torch.stack([phi.sum(dim=1) for phi in islice(phis, 1, None)]), factors  # eq. 8


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, bool], x: Tensor, *matrices: Tensor) -> Tensor:
        ctx.dtype, store = options
        sums, factors = _forward(x, matrices, ctx.dtype)
        ctx.save_for_backward(x, *matrices, *(factors if store else []))
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradient):  # as in the forward pass
            return _backward(ctx, gradient)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    _, x_needed, *needed = ctx.needs_input_grad
    x, *tensors = ctx.saved_tensors
    matrices, factors = tensors[: len(needed)], tensors[len(needed) :]
    if not factors or torch.is_grad_enabled():  # for the gradient of this gradient
        _, factors = _forward(x, matrices, ctx.dtype)
    factors = [A.to(x.dtype) for A in factors]
    phis = list(accumulate(factors[:-1], torch.mul))
    rows = x.to(ctx.dtype).reshape(-1, x.shape[-1])
    D, dx, dWs = gradient[-1].unsqueeze(1), None, [None] * len(needed)
    for k in reversed(range(len(needed))):
        dA = (phis[k - 1] * D if k else D).to(ctx.dtype)
        if needed[k]:
            dWs[k] = rows.T @ dA.reshape(-1, dA.shape[-1])
        if x_needed:
            part = (dA @ matrices[k].to(ctx.dtype).T).to(x.dtype)
            dx = part if dx is None else dx + part
        if k:
            D = factors[k] * D
        if k > 1:
            D = D + gradient[k - 2].unsqueeze(1)
    return None, dx, *dWs
