"""HORDE's moments: against plain operations in float64, and their times."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import pml_regularizers as ours
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from speed.case import FLOAT32, TF32, Case
from speed.losses import Sizes
from speed.measuring import matmul_precision

PAPER = {True: Sizes(2, 16, 16, 8, 64, 3, 4), False: Sizes(40, 64, 1024, 512, 8192, 5, 100)}
"""Sizes; True: tiny."""


def by_autograd(x: Tensor, *matrices: Tensor) -> Tensor:
    """Sums of products of projections by plain operations."""
    phi, sums = torch.ones((), device=x.device), []
    for W in matrices:
        phi = phi * (x @ W.to(x.dtype))
        sums.append(phi.sum(dim=1))
    return torch.stack(sums[1:])


def sketches_by_autograd(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """Sums of convolutions of sketches by plain operations."""
    d = len(tables[0])
    padded = F.pad(x, (1, 0))  # channel 0 is for places without a channel
    phi, sums = torch.ones((), device=x.device), []
    for table in tables:
        places = table.flatten().long()
        sketch = (padded[..., places.abs()] * places.sign()).unflatten(2, (d, -1)).sum(dim=3)
        phi = phi * torch.fft.rfft(sketch)
        sums.append(torch.fft.irfft(phi.sum(dim=1), n=d))
    return torch.stack(sums[1:])


def summed(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Sums of products from features and floating matrices, and their gradients, in a precision."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    sums = function(*leaves)
    return [sums.detach(), *torch.autograd.grad(sums, leaves, gradient.to(dtype))]


def draw_features(case: Case, sizes: Sizes) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Features, the gradient of the sums, and matrices, on the device."""
    N, P, C, d, K, device = sizes.N, sizes.P, sizes.C, sizes.d, sizes.K, case.device
    x, gradient = torch.randn(N, P, C, device=device), torch.randn(K - 1, N, d, device=device)
    return x, gradient, list(torch.randn(K, C, d, device=device) / C**0.5)


def draw_tables(case: Case, sizes: Sizes) -> list[Tensor]:
    shape = sizes.d, -(-sizes.C // sizes.d)
    tables = [torch.empty(shape, dtype=torch.int32, device=case.device) for _ in range(sizes.K)]
    for table in tables:
        convolutions.draw_table(table, sizes.C)
    return tables


def project(x: Tensor, *matrices: Tensor, checkpoint: bool = False) -> Tensor:
    return products.summed_products(x, matrices, checkpoint=checkpoint)


def check_moments(case: Case, kind: str) -> None:
    """HORDE's moments at the paper's size: "trained", "random" or "sketched"."""
    x, gradient, matrices = draw_features(case, sizes := PAPER[case.tiny])
    plain: Callable[..., Tensor] = by_autograd
    call: Callable[..., Tensor] = project
    inputs = [x, *matrices]
    if kind == "random":
        inputs, signs = [x], [W.sign().to(torch.int8) for W in matrices]
        plain = lambda x: by_autograd(x, *signs)  # noqa: E731
        call = lambda x, checkpoint: project(x, *signs, checkpoint=checkpoint)  # noqa: E731
    elif kind == "sketched":
        inputs, tables = [x], draw_tables(case, sizes)
        plain = partial(sketches_by_autograd, tables=tables)
        call = partial(convolutions.summed_convolutions, tables=tables)
    expected = summed(plain, inputs, gradient, torch.float64)
    for way, checkpoint in (("stored", False), ("recomputed", True)):
        run = partial(summed, partial(call, checkpoint=checkpoint), inputs, gradient, torch.float32)
        case.check(f"{kind} moments, float32, {way}", found := run(), expected, FLOAT32)
        if kind == "sketched":
            case.check(f"sketched moments, float32, {way}, a second call", run(), found, 0)
    if kind == "trained":
        with matmul_precision("high"):
            found = summed(project, inputs, gradient, torch.float32)
        case.check("trained moments, TF32", found, expected, TF32)


def draw_maps(case: Case, sizes: Sizes) -> tuple[Tensor, str]:
    """Feature maps, which need a gradient, and their size in words."""
    side = round(sizes.P**0.5)
    maps = torch.randn(sizes.N, sizes.C, side, side, device=case.device, requires_grad=True)
    return maps, f"{sizes.N} maps of {side} x {side} x {sizes.C}, {sizes.K} orders"


def moments(maps: Tensor, K: int, d: int, **options: Any) -> Callable[[], object]:
    """HORDE's moments, forward and backward, with the gradients of those projections that train."""
    options = {"projections": "cascaded", **options}
    module = ours.HighOrderMoments(maps.shape[1], order=K, moment_dim=d, scale=False, **options)
    inputs = [maps, *module.to(maps.device).parameters()]
    gradients = [torch.randn(len(maps), d, device=maps.device) for _ in range(K - 1)]
    return lambda: torch.autograd.grad(module(maps), inputs, gradients)


def horde_moments(case: Case) -> None:
    """HORDE's moments against their matrix products alone."""
    maps, size = draw_maps(case, sizes := PAPER[case.tiny])
    x = torch.randn(sizes.N * sizes.P, sizes.C, device=case.device)
    weights = torch.randn(sizes.K, sizes.C, sizes.d, device=case.device)
    out, gradient = torch.randn(2, len(x), sizes.d, device=case.device)
    dx, dw = torch.empty_like(x), torch.empty_like(weights[0])

    def multiply() -> None:
        for weight in weights:
            torch.mm(x, weight, out=out)
        for weight in weights:
            torch.mm(gradient, weight.T, out=dx)
            torch.mm(x.T, gradient, out=dw)

    row = partial(moments, maps, sizes.K, sizes.d)
    rows = {"stored": row(), "recomputed": row(checkpoint=True)}
    title, size = "HORDE's moments, forward and backward", f"{size} of {sizes.d}, float32"
    case.compare(title, size, {"matrix products alone": multiply} | rows)


def horde_sketches(case: Case, *, checkpoint: bool) -> None:
    """HORDE's moments by tensor sketches against fixed matrices, with the same kind of backward pass."""
    maps, size = draw_maps(case, sizes := PAPER[case.tiny])
    row, d = partial(moments, maps, sizes.K, checkpoint=checkpoint), sizes.d
    rows = {
        f"random, d = {d:,}": row(d, projections="random"),
        f"sketch, d = {d // 4:,}": row(d // 4, projections="sketch"),
        f"sketch, d = {d:,}": row(d, projections="sketch"),
    }
    way = "recomputed" if checkpoint else "stored"
    title = f"HORDE's moments by sketches, {way}, forward and backward"
    case.compare(title, f"{size}, float32", rows)


def horde_sketches_by_autograd(case: Case) -> None:
    """The recommended moments, orders 2 and 3 by sketches, against the same operations left to autograd."""
    sizes = PAPER[case.tiny].default()._replace(N=3 if case.tiny else 32)
    maps, size = draw_maps(case, sizes)
    tables = draw_tables(case, sizes)
    gradient = torch.randn(sizes.K - 1, sizes.N, sizes.d, device=case.device)

    def autograd() -> object:
        x = maps.flatten(2).transpose(1, 2)
        x = x / x.detach().square().mean(dim=(1, 2), keepdim=True).sqrt()
        return torch.autograd.grad(sketches_by_autograd(x, tables) / sizes.P, maps, gradient)

    row = partial(moments, maps, sizes.K, sizes.d, projections="sketch")
    rows = {"autograd": autograd, "stored": row(), "recomputed": row(checkpoint=True)}
    title = "HORDE's moments by sketches against autograd, forward and backward"
    case.compare(title, f"{size} of {sizes.d}, float32", rows)


def compare_blocks(case: Case) -> None:
    """Forward and backward of the moments at several block sizes; the size that is set comes first."""
    x, gradient, matrices = draw_features(case, sizes := PAPER[case.tiny])
    small, inputs = sizes.default(), [y.requires_grad_() for y in (x, *matrices)]
    tables, other = draw_tables(case, small), gradient[: small.K - 1, :, : small.d].contiguous()

    def trained() -> object:
        return torch.autograd.grad(project(*inputs), inputs, gradient)

    def sketched() -> object:
        return torch.autograd.grad(convolutions.summed_convolutions(x, tables), x, other)

    def with_block(module: Any, block: int, run: Callable[[], object]) -> None:
        with mock.patch.object(module, "GPU_BLOCK", block):
            run()

    size = f"{sizes.N} maps of {sizes.P} positions and {sizes.C} channels, forward and backward"
    for title, module, run, powers in (
        (f"products, K = {sizes.K}, d = {sizes.d}", products, trained, range(20, 27)),
        (f"sketches, K = {small.K}, d = {small.d}", convolutions, sketched, range(18, 25)),
    ):
        blocks = [module.GPU_BLOCK, *(2**k for k in ((8, 10) if case.tiny else powers))]
        rows = {
            f"{block:,} numbers in a block": partial(with_block, module, block, run)
            for block in dict.fromkeys(blocks)
        }
        title = f"Block sizes: {title}"
        case.compare(title, size, rows, rounds=15, memory=None, calls=2)
