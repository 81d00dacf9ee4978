r"""Second-order estimation based attention (Sun, Kamata, "Second-Order Estimation Based Attention Network for
Metric Learning").

    loss_var = 1/m sum_i (a_i - A_i)^2      eq. 3     `VarianceRegularizer`
    L        = w loss_var + loss_metric     eq. 4     w = 1: a weight of `MultipleLosses`
    s_i      = sigmoid(A_i) v_i             eq. 5     `variance_gate`, `VEMAttention`

with v the m features that a linear layer embeds, a their variance over the batch, and A the predicted variance:
one trained vector, which is the whole "variance estimation module" (VEM). Features of high variance get more
weight. At test time A is a constant: one multiplication per feature remains, and `fold` removes that too.

What the paper leaves open. Its section III-B flattens a feature map into m features, but also speaks of channels.
Here m is the number of channels of pooled features; `VEMAttention(C * H * W)` on `x.flatten(1)` is the other
reading. The variance is taken with 1/N (`unbiased=True`: 1/(N-1)). The "randomly initialized" vector is drawn
from N(0, 1) (`init="zeros"`: every gate starts at 1/2). Eq. 6 minimises the sum over all parameters, so eq. 3
also trains the trunk, and the metric loss A (`detach_features=True`: eq. 3 trains only A, as in section III-B).

Since a variance is never negative, a converged gate lies between 1/2 and 1: it weighs features, but discards none.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..functional.checks import whole_numbers
from ..offered.utils.variance_attention import VarianceAttention, variance_gate


class VEMAttention(VarianceAttention):
    """Attention that weighs features by their predicted variance, which `VarianceRegularizer` trains.

    Put it between pooling and the linear layer: `EmbeddingHead(..., attention=VEMAttention)`. On maps and tokens it
    weighs the channels, and predicts the variance of their means over all positions. The output depends on no
    statistic of the batch.

    **Adam moves a parameter by about its learning rate per step**: at a pretrained trunk's rate of 1e-5, A stays
    at its random start for a whole training. `optimizer_settings` holds the learning rate that it needs, without
    weight decay, which would pull a prediction towards 0.

    Its child `statistics`, which a loss attaches to, gives the pair of the pooled features, before the gate, and A,
    one row per sample: (N, m), (N, m). The pair is computed only while something is attached.

    Args:
        num_features: m.
        init: Start of A: "normal", N(0, 1), for the paper's "randomly initialized", or "zeros".

    Shape:
        features: (N, m), (N, L, m), or (N, m, H, W); channels-last maps need `permute(0, 3, 1, 2)`.
        Output: the same shape and dtype.

    Raises:
        ValueError: for num_features < 1, an unknown init, or features of another width.

    Example:
        >>> import torch
        >>> attention = VEMAttention(96, init="zeros")
        >>> attention(torch.ones(2, 96)).unique(), attention(torch.randn(2, 96, 7, 7)).shape
        (tensor([0.5000], grad_fn=<Unique2Backward0>), torch.Size([2, 96, 7, 7]))
    """

    optimizer_settings: ClassVar[dict[str, float]] = {"lr": 1e-2, "weight_decay": 0.0}
    """Settings for the optimizer group of `parameters()`."""

    def __init__(self, num_features: int, *, init: Literal["normal", "zeros"] = "normal") -> None:
        whole_numbers(num_features=num_features)
        super().__init__(num_features, init=init)
        self.statistics = nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        gated: Tensor = super().forward(features)
        if self.statistics._forward_hooks:
            self._show(features)
        return gated

    def _show(self, features: Tensor) -> None:
        """Hand the pooled features and A to what is attached."""
        if features.ndim > 2:
            dtype = torch.promote_types(features.dtype, torch.float32)
            features = features.mean(dim=1 if features.ndim == 3 else (2, 3), dtype=dtype)
        # One row per sample: records of several passes join, and processes share the gradient of A as that of the
        # features. A copy: an expanded view of a parameter requires a gradient even under torch.no_grad.
        self.statistics((features, self.variance.repeat(len(features), 1)))

    def fold(self, linear: nn.Linear) -> nn.Linear:
        """A linear layer that does the work of this attention followed by `linear`.

        A plain one: the weight of `linear`, as weight norm or any parametrization computes it, its columns
        multiplied by the gates, and its bias.

        Raises:
            ValueError: unless `linear` is a linear layer with `num_features` inputs.
        """
        if not isinstance(linear, nn.Linear) or linear.in_features != self.num_features:
            raise ValueError(
                f"linear: expected a torch.nn.Linear with {self.num_features} inputs, got {linear}"
            )
        with torch.enable_grad():  # a computed weight knows whether it is trained
            # torch.nn.utils.weight_norm computes the weight only in a call: before, it may be out of date.
            linear(next(linear.parameters(), linear.weight).new_zeros(1, self.num_features))
            weight, bias = linear.weight, linear.bias
        sizes = linear.in_features, linear.out_features
        folded = nn.Linear(*sizes, bias=bias is not None, device="meta")  # draws no numbers
        gated = variance_gate(weight.detach(), self.variance.detach())
        folded.weight = nn.Parameter(gated, weight.requires_grad)
        if bias is not None:
            folded.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return folded.train(linear.training)

    def extra_repr(self) -> str:
        return f"{self.num_features}, init={self.init!r}"
