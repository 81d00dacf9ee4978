r"""High-order moments of a feature map (HORDE: Jacob, Picard, Histace, Klein, ICCV 2019).

    phi_2(x) = (W_1^T x) * (W_2^T x) / sqrt(d)      Algorithm 1, line 2
    phi_k(x) = phi_{k-1}(x) * (W_k^T x)             eq. 6, cascaded
    phi_k(x) = prod_{i=1..k} W_{k,i}^T x / sqrt(d)  eq. 4, independent: each order has its own matrices
    z_k      = mean over positions of phi_k(x)      eq. 8

`*` is the element-wise product, taken at each position before the mean. With W in {-1, +1},
<phi_k(x), phi_k(y)> estimates <x, y>^k without bias (eq. 2, 5).

Tensor sketches (Pham and Pagh, KDD 2013; Gao et al., CVPR 2016) estimate the same power, with sparse matrices C_i
that have one entry, -1 or +1, per channel, and circular convolution (*) in place of `*`; see
`_summed_convolutions.py`:

    phi_k(x) = C_1^T x (*) ... (*) C_k^T x

Differs from the paper: each image's features are divided by their root mean square s before the products,
and the result is multiplied by s^k, which gives the same moment. Otherwise order 5 of features of size 1e-6 or
1e4 would be zero or infinite in float32. Trained matrices start Glorot-uniform, as in the authors' code;
`init="rademacher"` restores Algorithm 1's {-1, +1}.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from . import _triton_products
from ._feature_maps import masked_mean, to_tokens
from ._precision import CheckedIntegers, integer_fault
from ._summed_convolutions import draw_table, summed_convolutions, table_fault
from ._summed_products import Activations, Kernels, kept_projections, summed_products

Projections = Literal["cascaded", "independent", "random", "sketch"]
FIXED = {"random", "sketch"}
Init = Literal["glorot", "rademacher"]
Products = Literal["full", "bfloat16"]


def cascaded_moments(
    x: Tensor, projections: Sequence[Tensor], mask: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Moments of orders 2..K by the recursion of eq. 6.

    Args:
        x: (N, P, C), P features of C channels for each of N images.
        projections: W_1 .. W_K, each (C, d).
        mask: (N, P) booleans, True where a feature counts; default: all.
        **options: `dtype`, `activations` and `kernels` of `summed_products`; they do not change the result.

    Returns:
        K - 1 tensors (N, d).
    """
    return _means(x, [projections], mask, first=2, **options)


def sketched_moments(
    x: Tensor,
    tables: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    size: Tensor | None = None,
    activations: Activations = "store",
) -> list[Tensor]:
    """Moments of orders 2..K as tensor sketches, means over all positions (eq. 8).

    Args:
        x: (N, P, C).
        tables: Tables of C_1 .. C_K, each (d, R), from `HighOrderMoments(..., projections="sketch").weights()`.
            Fast if d is a power of two.
        mask: (N, P) booleans, True where a feature counts; default: all.
        size: (N, 1), constants by which the features of each image are divided; default: 1.
        activations: As in `HighOrderMoments`.

    Returns:
        K - 1 tensors (N, d).

    Raises:
        ValueError: for fewer than two tables, tables that do not fit C or each other, or that are none: every
            one holds each channel once (in compiled code, only the dtype is checked).
    """
    shapes = [tuple(table.shape) for table in tables]
    alike = len(shapes) > 1 and len({*shapes}) == 1 and len(shapes[0]) == 2
    if not alike or math.prod(shapes[0]) < x.shape[2]:
        raise ValueError(
            f"tables: expected two or more of one shape (moment_dim, R) with room for the {x.shape[2]} "
            f"channels, got {shapes}; pass weights() of one module"
        )
    if not torch.compiler.is_compiling():
        for table in tables:
            if (fault := table_fault(table, x.shape[2])) is not None:
                raise ValueError(f"tables: {fault}")
    return _sketched(x, tables, mask, size=size, activations=activations)


def _sketched(
    x: Tensor,
    tables: Sequence[Tensor],
    mask: Tensor | None,
    *,
    size: Tensor | None,
    activations: Activations,
) -> list[Tensor]:
    """`sketched_moments` of tables that were checked when loaded: to look at them again, a GPU would wait."""
    for table in tables:
        if (fault := integer_fault(table)) is not None:
            raise ValueError(f"tables: {fault}")
    x, count = _counted(x, mask)
    sums = summed_convolutions(x, tables, size=size, activations=activations)
    return list((sums / count).unbind())  # eq. 8


def _means(
    x: Tensor,
    sets: Iterable[Sequence[Tensor]],
    mask: Tensor | None,
    first: int | None,
    **options: Any,
) -> list[Tensor]:
    """Moments of the last orders of each set of matrices, from `first` on; without it, only the last (eq. 4)."""
    x, count = _counted(x, mask)
    moments: list[Tensor] = []
    for matrices in sets:
        sums = summed_products(x, matrices, first=first or len(matrices), **options)
        # Eq. 8's mean, and the root of eq. 5's 1/d, as in Algorithm 1, line 2.
        moments += (sums / (count * math.sqrt(matrices[0].shape[1]))).unbind()
    return moments


def _counted(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The features, with zeros where the mask is False, and the number (N, 1) of those that count, at least 1."""
    if mask is None:
        return x, x.new_full((len(x), 1), x.shape[1])
    # Padding may hold NaN, which a mask on only the products would leave in the gradient.
    count = mask.sum(dim=1, keepdim=True).clamp(min=1).to(x.dtype)
    return x.masked_fill(~mask.unsqueeze(2), 0), count


class HighOrderMoments(CheckedIntegers, nn.Module):
    """One vector per order 2..K that approximates a moment of an image's features.

    Args:
        in_channels: C, channels of the feature map.
        order: Highest moment K. HORDE, section 4: 5 on CUB and Cars, 4 on SOP and In-Shop.
        moment_dim: d, width of every order. HORDE, section 4: 8192.
        projections: "cascaded" (eq. 6, one matrix per order: the paper's method), "independent" (eq. 4,
            k matrices for order k: its Table 4), both trained; "random" (fixed matrices of -1 and +1, the first k
            for order k: its Table 3), stored as buffers of one byte per entry; or "sketch" (tensor sketches, not
            in the paper): also fixed, with a fraction of the arithmetic and, at the same d, a smaller variance; d
            should be a power of two.
        init: Start of trained matrices: "glorot", as in the authors' code, or "rademacher", {-1, +1}.
        activations: How to keep what the backward pass needs: "store" it, K d P numbers per image; "recompute"
            it, with a third more arithmetic and almost no memory; or leave it to "autograd", for comparison.
        products: "full": matrix products in the precision of the moments; "bfloat16": only the matrix products in
            bfloat16, which halves what is stored. At C = 1024 errors stay below 2^-6 of the largest entry
            (tested). Sketches have no matrix products.
        kernels: "triton" (CUDA devices), "torch", or "auto": Triton where it runs. They differ only in speed.
            Sketches have no kernel.
        scale: Multiply by s^k (see above). If an L2 normalisation follows, the factor changes nothing but may
            overflow: `HORDELoss` then leaves it out. Without the factor, the gradient is exact only if such a
            normalisation follows.

    Shape:
        features: (N, C, H, W), (N, L, C), or the pair (N, L, C), (N, L) of tokens and a boolean mask that
        is True for the tokens that count. Output: K - 1 tensors (N, d), in float32 or float64.

    Raises:
        ValueError: for order < 2, sizes < 1, an unknown word, bfloat16 or Triton with sketches, or features that
            do not fit.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        order: int = 5,
        moment_dim: int = 8192,
        projections: Projections = "cascaded",
        init: Init = "glorot",
        activations: Activations = "store",
        products: Products = "full",
        kernels: Kernels = "auto",
        scale: bool = True,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("in_channels", in_channels, 1),
            ("order", order, 2),
            ("moment_dim", moment_dim, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        for name, word, words in (
            ("projections", projections, get_args(Projections)),
            ("init", init, get_args(Init)),
            ("products", products, get_args(Products)),
            ("activations", activations, get_args(Activations)),
            ("kernels", kernels, get_args(Kernels)),
        ):
            if word not in words:
                raise ValueError(f"{name}: expected one of {', '.join(words)}; got {word!r}")
        if projections == "sketch" and (products != "full" or kernels == "triton"):
            raise ValueError(
                'projections: "sketch" has no matrix products and no kernel; expected products="full" and '
                f'kernels="auto" or "torch", got {products!r} and {kernels!r}'
            )
        if kernels == "triton" and not _triton_products.available:
            raise ValueError(
                'kernels: Triton is not installed; pip install triton, or pass "torch"'
            )
        self.in_channels = in_channels
        self.order = order
        self.moment_dim = moment_dim
        self.projections = projections
        self.init = init
        self.activations = activations
        self.products = products
        self.kernels = kernels
        self.scale = scale
        # "independent" order k owns k matrices; the others share one per order.
        count = order if projections != "independent" else sum(range(2, order + 1))
        for index in range(count):
            if projections == "sketch":
                table = torch.empty(
                    moment_dim, math.ceil(in_channels / moment_dim), dtype=torch.int32
                )
                self.register_buffer(f"weight_{index}", table)
                continue
            weight = torch.empty(in_channels, moment_dim)
            if projections == "random":
                self.register_buffer(f"weight_{index}", weight.to(torch.int8))
            else:
                self.register_parameter(f"weight_{index}", nn.Parameter(weight))
        self._count = count
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices or tables anew from torch's global generator."""
        for weight in self.weights():
            with torch.no_grad():
                if self.projections == "sketch":
                    draw_table(weight, self.in_channels)
                elif self.projections == "random" or self.init == "rademacher":
                    weight.bernoulli_(0.5).mul_(2).sub_(1)
                else:
                    nn.init.xavier_uniform_(weight)

    def weights(self) -> list[Tensor]:
        """Return the matrices, each (C, d): W_1 .. W_K, or, if independent, W_{2,1}, W_{2,2}, W_{3,1}, ...

        With sketches: the tables, (d, R) with the least R that leaves room for C. Row j holds c or -c for each
        channel c, counted from 1, that is added to or subtracted from entry j of the sketch, and 0 elsewhere.
        """
        return [getattr(self, f"weight_{index}") for index in range(self._count)]

    def forward(self, features: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
        x, mask = to_tokens(features, self.in_channels)
        floating = [weight.dtype for weight in self.weights() if weight.is_floating_point()]
        for dtype in (torch.float32, *floating[:1]):
            x = x.to(torch.promote_types(x.dtype, dtype))

        # A constant for the gradient: the moment of x/s times s^k is the moment of x for any s.
        size = masked_mean(x.detach().square(), mask).mean(dim=1).sqrt().view(-1, 1)
        size = size.clamp(min=1e-12)  # as in F.normalize: smaller maps fade to zero
        with torch.autocast(x.device.type, enabled=False):  # keeps the products precise
            moments = self._moments(x, size, mask)
        if self.scale:
            moments = [z * size**k for k, z in enumerate(moments, start=2)]
        return moments

    def _moments(self, x: Tensor, size: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Moments of x (N, P, C) divided by the size of each image, (N, 1)."""
        weights = self.weights()
        if self.projections == "sketch":
            options: dict[str, Any] = {"size": size, "activations": self.activations}
            return _sketched(x, weights, mask, **options)
        x = (x / size.unsqueeze(2)).contiguous()
        options = {
            "dtype": torch.bfloat16 if self.products == "bfloat16" else x.dtype,
            "activations": self.activations,
            "kernels": self.kernels,
        }
        if self.projections == "independent":
            parts = iter(weights)
            sets = [list(islice(parts, k)) for k in range(2, self.order + 1)]
            return _means(x, sets, mask, first=None, **options)
        return cascaded_moments(x, weights, mask, **options)

    def activation_bytes(self, images: int, positions: int) -> int:
        """Return the bytes that a batch keeps for the backward pass: features and, by `activations`, projections.

        For float32 features. The pass also needs some blocks of columns, of about 4 MiB each on a CPU.

        Args:
            images: N.
            positions: P, such as 64 of a map of 8 x 8.
        """
        lowest = 2 if self.projections == "independent" else self.order
        kept = sum(
            kept_projections(order, self.activations) for order in range(lowest, self.order + 1)
        )
        number = max(4, self.weights()[0].element_size())
        width = self.moment_dim
        if self.projections == "sketch":
            width = 2 * (width // 2 + 1)  # complex numbers
            kept += self.order * (self.activations == "autograd")  # the inputs of the transforms
        projection = width * (2 if self.products == "bfloat16" else number)
        return images * positions * (self.in_channels * number + kept * projection)

    def buffer_fault(self, saved: Tensor) -> str | None:
        if saved.is_meta:
            return None
        if self.projections == "sketch":
            return table_fault(saved, self.in_channels)
        if saved.dtype.is_signed and saved.float().abs().eq(1).all():
            return None
        return (
            "expected only -1 and 1, got other numbers; trained matrices belong to "
            'projections="cascaded" or "independent"'
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, order={self.order}, moment_dim={self.moment_dim}, "
            f"projections={self.projections!r}, activations={self.activations!r}, products={self.products!r}"
        )
