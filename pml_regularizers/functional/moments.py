r"""High-order moments of a feature map (HORDE: Jacob, Picard, Histace, Klein, ICCV 2019).

    phi_2(x) = (W_1^T x) * (W_2^T x) / sqrt(d)      Algorithm 1, line 2
    phi_k(x) = phi_{k-1}(x) * (W_k^T x)             eq. 6, cascaded
    phi_k(x) = prod_{i=1..k} W_{k,i}^T x / sqrt(d)  eq. 4, independent: each order has its own matrices
    z_k      = mean over positions of phi_k(x)      eq. 8

`*` is the element-wise product, taken at each position before the mean. With W in {-1, +1},
<phi_k(x), phi_k(y)> estimates <x, y>^k without bias (eq. 2, 5).

Tensor sketches (Pham and Pagh, KDD 2013; Gao et al., CVPR 2016) estimate the same power, with sparse matrices C_i
that have one entry, -1 or +1, per channel, and circular convolution (*) in place of `*`; see `sketches.py`:

    phi_k(x) = C_1^T x (*) ... (*) C_k^T x
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .products import summed_products
from .sketches import summed_convolutions, table_fault


def cascaded_moments(
    x: Tensor, projections: Sequence[Tensor], mask: Tensor | None = None
) -> list[Tensor]:
    """Moments of orders 2..K by the recursion of eq. 6: K - 1 tensors (N, d).

    Args:
        x: (N, P, C), P features of C channels for each of N images.
        projections: W_1 .. W_K, each (C, d).
        mask: (N, P) booleans, True where a feature counts; default: all.
    """
    x, count = count_features(x, mask)
    sums = summed_products(x, projections, 2, x.dtype, checkpoint=False)
    return means(sums, count * math.sqrt(projections[0].shape[1]))


def sketched_moments(
    x: Tensor, tables: Sequence[Tensor], mask: Tensor | None = None
) -> list[Tensor]:
    """Moments of orders 2..K as tensor sketches, means over all positions (eq. 8): K - 1 tensors (N, d).

    Args:
        x, mask: As in `cascaded_moments`.
        tables: Tables of C_1 .. C_K, each (d, R), from `HighOrderMoments(..., projections="sketch").weights()`.

    Raises:
        ValueError: for fewer than two tables, tables of several shapes, or tables that do not hold each of the C
            channels once (not in compiled code).
    """
    shapes = [tuple(table.shape) for table in tables]
    if len(shapes) < 2 or len({*shapes}) > 1:
        raise ValueError(
            f"tables: expected two or more of one shape (moment_dim, R), got {shapes}; pass weights() of one module"
        )
    if not torch.compiler.is_compiling():
        for table in tables:
            if fault := table_fault(table, x.shape[2]):
                raise ValueError(f"tables: {fault}")
    x, count = count_features(x, mask)
    return means(summed_convolutions(x, tables), count)


def count_features(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | int]:
    """The features, with zeros where the mask is False, and how many count, at least 1: a number, or (N, 1)."""
    if mask is None:
        return x, x.shape[1]
    # Padding may hold NaN, which a mask on only the products would leave in the gradient.
    count = mask.sum(dim=1, keepdim=True).clamp(min=1).to(x.dtype)
    return x.masked_fill(~mask.unsqueeze(2), 0), count


def root_mean_square(x: Tensor, count: Tensor | int) -> Tensor:
    """Root mean square (N, 1) of the features (N, P, C) that count; 1e-12 if smaller, as in F.normalize."""
    # Above about 1e12 features are divided by a number near their largest, because squares might overflow.
    largest = torch.linalg.vector_norm(x, math.inf, dim=(1, 2)).unsqueeze(1)
    unit = (2.0**-40 * largest).clamp(min=1)
    length = torch.linalg.vector_norm(x / unit.unsqueeze(2), dim=(1, 2)).unsqueeze(1)
    size: Tensor = (unit * (length / (count * x.shape[2]) ** 0.5)).clamp(min=1e-12)
    return size


def means(sums: Tensor, count: Tensor | float) -> list[Tensor]:
    """Moments of orders 2..K, each (N, d), from their sums (K - 1, N, d) and numbers of features, (N, 1) or one."""
    return list((sums / count).unbind())  # eq. 8
