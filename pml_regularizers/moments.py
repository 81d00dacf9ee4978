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
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ._checks import at_least, one_of
from ._feature_maps import to_tokens
from ._summed_convolutions import draw_table, fast_width, summed_convolutions, table_fault
from ._summed_products import summed_products

Projections = Literal["cascaded", "independent", "random", "sketch"]
FIXED = {"random", "sketch"}
Init = Literal["glorot", "rademacher"]


def cascaded_moments(
    x: Tensor, projections: Sequence[Tensor], mask: Tensor | None = None
) -> list[Tensor]:
    """Moments of orders 2..K by the recursion of eq. 6.

    Args:
        x: (N, P, C), P features of C channels for each of N images.
        projections: W_1 .. W_K, each (C, d).
        mask: (N, P) booleans, True where a feature counts; default: all.

    Returns:
        K - 1 tensors (N, d).
    """
    x, count = _counted(x, mask)
    sums = summed_products(x, projections, 2, x.dtype, checkpoint=False)
    return _means(sums, count * math.sqrt(projections[0].shape[1]))


def sketched_moments(
    x: Tensor, tables: Sequence[Tensor], mask: Tensor | None = None
) -> list[Tensor]:
    """Moments of orders 2..K as tensor sketches, means over all positions (eq. 8).

    Args:
        x: (N, P, C).
        tables: Tables of C_1 .. C_K, each (d, R), from `HighOrderMoments(..., projections="sketch").weights()`.
        mask: (N, P) booleans, True where a feature counts; default: all.

    Returns:
        K - 1 tensors (N, d).

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
    x, count = _counted(x, mask)
    return _means(summed_convolutions(x, tables), count)


def _counted(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The features, with zeros where the mask is False, and the number (N, 1) of those that count, at least 1."""
    if mask is None:
        return x, x.new_full((len(x), 1), x.shape[1])
    # Padding may hold NaN, which a mask on only the products would leave in the gradient.
    count = mask.sum(dim=1, keepdim=True).clamp(min=1).to(x.dtype)
    return x.masked_fill(~mask.unsqueeze(2), 0), count


def _size(x: Tensor, count: Tensor) -> Tensor:
    """Root mean square (N, 1) of the features (N, P, C) that count; 1e-12 if smaller, as in F.normalize."""
    # Above about 1e12 features are divided by a number near their largest, because squares might overflow.
    largest = torch.linalg.vector_norm(x, math.inf, dim=(1, 2)).unsqueeze(1)
    unit = (2.0**-40 * largest).clamp(min=1)
    squares = (x / unit.unsqueeze(2)).square().sum(dim=1) / count
    return (unit * squares.mean(dim=1, keepdim=True).sqrt()).clamp(min=1e-12)


def _means(sums: Tensor, count: Tensor) -> list[Tensor]:
    return list((sums / count).unbind())  # eq. 8


class HighOrderMoments(nn.Module):
    """One vector per order 2..K that approximates a moment of an image's features.

    Args:
        in_channels: C, channels of the feature map.
        order: Highest moment K. HORDE, section 4: 5 on CUB and Cars, 4 on SOP and In-Shop.
        moment_dim: d, width of every order. HORDE, section 4: 8192.
        projections: "cascaded" (eq. 6, one matrix per order: the paper's method), "independent" (eq. 4,
            k matrices for order k: its Table 4), both trained; "random" (fixed matrices of -1 and +1, the first k
            for order k: its Table 3), stored as buffers of one byte per entry; or "sketch" (tensor sketches, not
            in the paper): also fixed, with a fraction of the arithmetic and, at the same d, a smaller variance.
        init: Start of trained matrices: "glorot", as in the authors' code, or "rademacher", {-1, +1}.
        checkpoint: Compute the projections again in the backward pass, with a third more arithmetic, instead of
            storing them, K d P numbers per image.
        matmul_dtype: "bfloat16": only the matrix products in bfloat16, which halves what is stored. At C = 1024
            errors stay below 2^-6 of the largest entry (tested). Default: in the precision of the moments.
            Sketches have no matrix products.
        scale: Multiply by s^k (see above). If an L2 normalisation follows, the factor changes nothing but may
            overflow: `HORDELoss` then leaves it out. Without the factor, the gradient is exact only if such a
            normalisation follows.

    Shape:
        features: (N, C, H, W), (N, L, C), or the pair (N, L, C), (N, L) of tokens and a boolean mask that
        is True for the tokens that count. Output: K - 1 tensors (N, d), in float32 or float64.

    Raises:
        ValueError: for order < 2, sizes < 1, an unknown word, bfloat16 with sketches, or features that do not fit.

    Warns:
        UserWarning: for sketches of a width with a prime factor above 7, which Fourier transforms are slow on.

    Example:
        >>> import torch
        >>> moments = HighOrderMoments(32, order=3, moment_dim=64, projections="sketch")
        >>> [z.shape for z in moments(torch.randn(4, 32, 7, 7))]
        [torch.Size([4, 64]), torch.Size([4, 64])]
    """

    def __init__(
        self,
        in_channels: int,
        *,
        order: int = 5,
        moment_dim: int = 8192,
        projections: Projections = "cascaded",
        init: Init = "glorot",
        checkpoint: bool = False,
        matmul_dtype: Literal["bfloat16"] | None = None,
        scale: bool = True,
    ) -> None:
        super().__init__()
        at_least("in_channels", in_channels, 1)
        at_least("order", order, 2)
        at_least("moment_dim", moment_dim, 1)
        one_of("projections", projections, get_args(Projections))
        one_of("init", init, get_args(Init))
        one_of("matmul_dtype", matmul_dtype, (None, "bfloat16"))
        if projections == "sketch" and matmul_dtype is not None:
            raise ValueError(
                'matmul_dtype: expected None for projections="sketch", which has no matrix products, '
                f"got {matmul_dtype!r}"
            )
        if projections == "sketch" and (fast := fast_width(moment_dim)) != moment_dim:
            warnings.warn(
                f"moment_dim: sketches are slow at {moment_dim}, which has a prime factor above 7; the next fast "
                f"width is {fast}",
                stacklevel=2,
            )
        self.in_channels = in_channels
        self.order = order
        self.moment_dim = moment_dim
        self.projections = projections
        self.init = init
        self.checkpoint = checkpoint
        self.matmul_dtype = matmul_dtype
        self.scale = scale
        # "independent" order k owns k matrices; the others share one per order.
        self._count = order if projections != "independent" else sum(range(2, order + 1))
        for name in self._names():
            if projections == "sketch":
                shape = moment_dim, math.ceil(in_channels / moment_dim)
                self.register_buffer(name, torch.empty(shape, dtype=torch.int32))
            elif projections == "random":
                signs = torch.empty(in_channels, moment_dim, dtype=torch.int8)
                self.register_buffer(name, signs)
            else:
                setattr(self, name, nn.Parameter(torch.empty(in_channels, moment_dim)))
        self.reset_parameters()

    def _names(self) -> list[str]:
        return [f"weight_{index}" for index in range(self._count)]

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
        return [getattr(self, name) for name in self._names()]

    def forward(self, features: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
        x, mask = to_tokens(features, self.in_channels)
        floating = [weight.dtype for weight in self.weights() if weight.is_floating_point()]
        for dtype in (torch.float32, *floating[:1]):
            x = x.to(torch.promote_types(x.dtype, dtype))
        x, count = _counted(x, mask)
        # A constant for the gradient: the moment of x/s times s^k is the moment of x for any s.
        size = _size(x.detach(), count)
        with torch.autocast(x.device.type, enabled=False):  # keeps the products precise
            moments = self._moments(x, size, count)
        if self.scale:
            moments = [z * size**k for k, z in enumerate(moments, start=2)]
        return moments

    def _moments(self, x: Tensor, size: Tensor, count: Tensor) -> list[Tensor]:
        """Moments of x (N, P, C) divided by the size of each image, (N, 1)."""
        weights = self.weights()
        if self.projections == "sketch":
            return _means(summed_convolutions(x, weights, size, self.checkpoint), count)
        x = (x / size.unsqueeze(2)).contiguous()
        dtype = x.dtype if self.matmul_dtype is None else getattr(torch, self.matmul_dtype)
        groups = [(2, weights)]
        if self.projections == "independent":
            parts = iter(weights)
            groups = [(k, list(islice(parts, k))) for k in range(2, self.order + 1)]
        # The root of eq. 5's 1/d, as in Algorithm 1, line 2.
        divisor = count * math.sqrt(self.moment_dim)
        moments: list[Tensor] = []
        for first, matrices in groups:
            sums = summed_products(x, matrices, first, dtype, self.checkpoint)
            moments += _means(sums, divisor)
        return moments

    def activation_bytes(self, images: int, positions: int) -> int:
        """Return the bytes that a batch keeps for the backward pass: features and what `checkpoint` leaves out.

        For float32 features. The pass also needs some blocks of columns, of about 4 MiB each on a CPU.

        Args:
            images: N.
            positions: P, such as 64 of a map of 8 x 8.
        """
        number = max(4, self.weights()[0].element_size())
        width = self.moment_dim
        if self.projections == "sketch":
            width = 2 * (width // 2 + 1)  # complex numbers
        projection = width * (number if self.matmul_dtype is None else 2)
        kept = 0 if self.checkpoint else self._count
        return images * positions * (self.in_channels * number + kept * projection)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, errors = args
        before = len(errors)
        for name, buffer in self.named_buffers():
            saved = state_dict.get(prefix + name, buffer)
            if saved.is_meta or saved.shape != buffer.shape:
                continue
            fault = None
            if self.projections == "sketch":
                fault = table_fault(saved, self.in_channels)
            elif saved.is_floating_point():
                fault = (
                    f"expected signs as integers, got {saved.dtype}; trained matrices belong to "
                    'projections="cascaded" or "independent", and only floating tensors may be cast'
                )
            if fault:
                errors.append(f"{prefix}{name}: {fault}")
        if len(errors) == before:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, order={self.order}, moment_dim={self.moment_dim}, "
            f"projections={self.projections!r}, checkpoint={self.checkpoint}, matmul_dtype={self.matmul_dtype!r}"
        )
