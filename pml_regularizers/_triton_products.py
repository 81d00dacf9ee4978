# mypy: ignore-errors
"""Two Triton kernels, forward and backward, for the work of `_summed_products.py` between its matrix products.

Both read every projection once and hold an image's tile of all orders in registers. They run on CUDA devices, and
under Triton's interpreter (`TRITON_INTERPRET=1`) anywhere.
"""

from torch import Tensor

try:
    import triton
    from triton import language as tl
except ImportError:  # comes with torch on Linux with CUDA
    available = False
else:
    available = True

TILE = {"POSITIONS": 16, "COLUMNS": 64}
"""1,024 numbers of every order, 8 for each of 128 threads."""


def add_up(factors: Tensor, sums: Tensor) -> None:
    """Fill sums (O, N, b), the last O orders, from factors (K, N, P, b)."""
    order, images, positions, columns = factors.shape
    _add_up[images, triton.cdiv(columns, TILE["COLUMNS"])](
        factors, sums, positions, columns, factors.stride(0), sums.stride(0), sums.stride(1),
        ORDER=order, FIRST=order - len(sums), **TILE,
    )  # fmt: skip


def share_out(factors: Tensor, gradient: Tensor, out: Tensor) -> None:
    """Fill out (K, N, P, b), which may be `factors`, with their gradient, from that of the sums (O, N, b)."""
    order, images, positions, columns = factors.shape
    _share_out[images, triton.cdiv(positions, TILE["POSITIONS"]), triton.cdiv(columns, TILE["COLUMNS"])](
        factors, gradient, out, positions, columns,
        factors.stride(0), gradient.stride(0), gradient.stride(1),
        ORDER=order, FIRST=order - len(gradient), **TILE,
    )  # fmt: skip


if available:

    @triton.jit
    def _add_up(
        factors, sums, positions, columns, factor_stride, sum_stride, row_stride,
        ORDER: tl.constexpr, FIRST: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        image = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        kind = sums.dtype.element_ty
        totals = ()
        for _ in tl.static_range(FIRST, ORDER):
            totals = totals + (tl.zeros((POSITIONS, COLUMNS), kind),)
        for start in range(0, positions, POSITIONS):
            position = start + tl.arange(0, POSITIONS)
            inside = (position < positions)[:, None] & (column < columns)[None, :]
            here = factors + (image * positions + position)[:, None] * columns + column[None, :]
            phi = tl.load(here, mask=inside, other=0).to(kind)
            later = ()
            for k in tl.static_range(1, ORDER):
                here += factor_stride
                phi *= tl.load(here, mask=inside, other=0).to(kind)  # eqs. 4, 6
                if k >= FIRST:
                    later = later + (totals[k - FIRST] + phi,)  # eq. 8, its sum
            totals = later
        here = sums + image * row_stride + column
        for k in tl.static_range(ORDER - FIRST):
            tl.store(here, tl.sum(totals[k], axis=0), mask=column < columns)
            here += sum_stride

    @triton.jit
    def _share_out(
        factors, gradient, out, positions, columns, factor_stride, gradient_stride, row_stride,
        ORDER: tl.constexpr, FIRST: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        image = tl.program_id(0).to(tl.int64)
        position = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        kind = gradient.dtype.element_ty
        inside = (position < positions)[:, None] & (column < columns)[None, :]
        place = (image * positions + position)[:, None] * columns + column[None, :]
        here = factors + place
        factor = tl.load(here, mask=inside, other=0).to(kind)
        loaded = (factor,)
        phis = (factor,)
        for _ in tl.static_range(1, ORDER):
            here += factor_stride
            factor = tl.load(here, mask=inside, other=0).to(kind)
            loaded = loaded + (factor,)
            phis = phis + (phis[-1] * factor,)
        rest = tl.zeros((POSITIONS, COLUMNS), kind)
        for k in tl.static_range(ORDER - 1, -1, -1):
            if k >= FIRST:
                row = gradient + (k - FIRST) * gradient_stride + image * row_stride + column
                rest += tl.load(row, mask=column < columns, other=0)[None, :]
            there = out + k * factor_stride + place
            if k > 0:
                tl.store(there, rest * phis[k - 1], mask=inside)
                rest *= loaded[k]
            else:
                tl.store(there, rest, mask=inside)
