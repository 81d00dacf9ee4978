r"""High-order moments of a feature map (HORDE: Jacob, Picard, Histace, Klein, ICCV 2019).

    phi_2(x) = (W_1^T x) * (W_2^T x) / sqrt(d)      Algorithm 1, line 2
    phi_k(x) = phi_{k-1}(x) * (W_k^T x)             eq. 6, cascaded
    phi_k(x) = prod_{i=1..k} W_{k,i}^T x / sqrt(d)  eq. 4, independent: each order has its own matrices
    phi_k(x) = C_1^T x (*) ... (*) C_k^T x          tensor sketches: `functional/sketches.py`
    z_k      = mean over positions of phi_k(x)      eq. 8

`*` is the element-wise product, taken at each position before the mean. With W in {-1, +1}, and with sketches,
<phi_k(x), phi_k(y)> estimates <x, y>^k without bias (eq. 2, 5).

Differs from the paper: each image's features are divided by their root mean square s before the products, and the
result is multiplied by s^k. Otherwise order 5 of features of size 1e-6 or 1e4 would be zero or infinite in float32.
Trained matrices start Glorot-uniform, as in the authors' code; `init="rademacher"` restores Algorithm 1's {-1, +1}.
"""

import math
import warnings
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..features.feature_maps import to_tokens
from ..functional.checks import one_of, whole_numbers
from ..functional.precision import without_autocast
from ..functional.products import summed_products
from ..functional.sketches import draw_table, fast_width, summed_convolutions

Projections = Literal["cascaded", "independent", "random", "sketch"]
FIXED = {"random", "sketch"}
Init = Literal["glorot", "rademacher"]


class HighOrderMoments(nn.Module):
    """One vector per order 2..K that approximates a moment of an image's features.

    Args:
        in_channels: C, channels of the feature map.
        order: Highest moment K. Default: our studies'. HORDE, section 4: 5 on CUB and Cars, 4 on SOP and In-Shop.
        moment_dim: d, width of every order. Default: our studies'. HORDE, section 4: 8192.
        projections: "sketch" (tensor sketches, not in the paper: fixed, with a fraction of the arithmetic and, at
            the same d, a smaller variance than random matrices); "cascaded" (eq. 6, one matrix per order: the
            paper's method) or "independent" (eq. 4, k matrices for order k: its Table 4), both trained; or "random"
            (fixed matrices of -1 and +1, the first k for order k: its Table 3), buffers of one byte per entry.
        init: Start of trained matrices: "glorot", as in the authors' code, or "rademacher", {-1, +1}.
        checkpoint: Compute the projections again in the backward pass, with a third more arithmetic, instead of
            storing them, K d numbers per position of an image.
        matmul_dtype: "bfloat16": only the matrix products, which sketches lack, in bfloat16, which halves what is
            stored. At C = 1024 errors stay below 2^-6 of the largest entry (tested). Default: as the moments.
        scale: Multiply by s^k (see above), which may overflow. If an L2 normalisation follows, as in `HORDELoss`,
            the factor changes nothing; only then is the gradient without it exact.

    Shape:
        features: (N, C, H, W), (N, L, C), or the pair (N, L, C), (N, L) of tokens and a boolean mask that
        is True for the tokens that count. Output: K - 1 tensors (N, d), in float32 or float64.

    Raises:
        ValueError: for order < 2, sizes < 1, an unknown word, bfloat16 with sketches, another start of fixed
            matrices; in the call, for features that do not fit, or on the meta device.

    Warns:
        UserWarning: for sketches of a width with a prime factor above 7, which Fourier transforms are slow on.

    Example:
        >>> import torch
        >>> [z.shape for z in HighOrderMoments(32)(torch.randn(4, 32, 7, 7))]
        [torch.Size([4, 1024]), torch.Size([4, 1024])]
    """

    def __init__(
        self,
        in_channels: int,
        *,
        order: int = 3,
        moment_dim: int = 1024,
        projections: Projections = "sketch",
        init: Init = "glorot",
        checkpoint: bool = False,
        matmul_dtype: Literal["bfloat16"] | None = None,
        scale: bool = True,
    ) -> None:
        super().__init__()
        whole_numbers(in_channels=in_channels, moment_dim=moment_dim)
        whole_numbers(2, order=order)
        one_of("projections", projections, get_args(Projections))
        one_of("init", init, get_args(Init))
        one_of("matmul_dtype", matmul_dtype, (None, "bfloat16"))
        if projections == "sketch" and matmul_dtype is not None:
            raise ValueError(
                'matmul_dtype: expected None for projections="sketch", which has no matrix products, '
                f"got {matmul_dtype!r}"
            )
        if projections in FIXED and init != "glorot":
            raise ValueError(
                f'init: starts trained matrices, and projections="{projections}" trains none, got {init!r}; leave '
                'it out, or take projections="cascaded"'
            )
        if projections == "sketch" and (fast := fast_width(moment_dim)) != moment_dim:
            warnings.warn(
                f"moment_dim: sketches are slow at {moment_dim}, which has a prime factor above 7; take {fast}",
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
        for index in range(self._count):
            name, shape = f"weight_{index}", (in_channels, moment_dim)
            if projections == "sketch":
                shape = moment_dim, math.ceil(in_channels / moment_dim)
                self.register_buffer(name, torch.empty(shape, dtype=torch.int32))
            elif projections == "random":
                self.register_buffer(name, torch.empty(shape, dtype=torch.int8))
            else:
                setattr(self, name, nn.Parameter(torch.empty(shape)))
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

        With sketches: the tables, (d, R), as `functional/sketches.py` describes them.
        """
        return [getattr(self, f"weight_{index}") for index in range(self._count)]

    def forward(self, features: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
        weights = self.weights()
        if weights[0].is_meta:  # torch's products would return uninitialised memory
            raise ValueError(
                "HighOrderMoments: on the meta device; call to_empty and load_state_dict"
            )
        x, mask = to_tokens(features, self.in_channels)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = x.to(torch.promote_types(x.dtype, weights[0].dtype))  # integers leave it as it is
        count: Tensor | int = x.shape[1]
        if mask is not None:
            # Padding may hold NaN, which a mask on only the products would leave in the gradient.
            x = x.masked_fill(~mask.unsqueeze(2), 0)
            count = mask.sum(dim=1, keepdim=True).clamp(min=1).to(x.dtype)
        # A constant for the gradient: the moment of x/s times s^k is the moment of x for any s.
        size = _root_mean_square(x.detach(), count)
        with without_autocast(x):  # keeps the products precise
            moments = self._moments(x, size, count)
        return [z * size**k for k, z in enumerate(moments, start=2)] if self.scale else moments

    def _moments(self, x: Tensor, size: Tensor, count: Tensor | int) -> list[Tensor]:
        """Moments of x (N, P, C) divided by the size of each image, (N, 1)."""
        weights = self.weights()
        if self.projections == "sketch":
            return list(summed_convolutions(x, weights, size, self.checkpoint) / count)
        x = (x / size.unsqueeze(2)).contiguous()
        dtype = x.dtype if self.matmul_dtype is None else getattr(torch, self.matmul_dtype)
        # The root of eq. 5's 1/d, as in Algorithm 1, line 2.
        divisor = count * math.sqrt(self.moment_dim)
        if self.projections != "independent":
            return list(summed_products(x, weights, dtype, self.checkpoint) / divisor)
        parts = iter(weights)
        groups = [list(islice(parts, k)) for k in range(2, self.order + 1)]
        return [summed_products(x, own, dtype, self.checkpoint)[-1] / divisor for own in groups]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, order={self.order}, moment_dim={self.moment_dim}, "
            f"projections={self.projections!r}, checkpoint={self.checkpoint}, matmul_dtype={self.matmul_dtype!r}"
        )


def _root_mean_square(x: Tensor, count: Tensor | int) -> Tensor:
    """Root mean square (N, 1) of `count` features of each of x (N, P, C); 1e-12 if smaller, as in F.normalize."""
    # Above about 1e12 features are divided by a number near their largest, because squares might overflow.
    largest = torch.linalg.vector_norm(x, math.inf, dim=(1, 2)).unsqueeze(1)
    unit = (2.0**-40 * largest).clamp(min=1)
    length = torch.linalg.vector_norm(x / unit.unsqueeze(2), dim=(1, 2)).unsqueeze(1)
    size: Tensor = (unit * (length / (count * x.shape[2]) ** 0.5)).clamp(min=1e-12)
    return size
