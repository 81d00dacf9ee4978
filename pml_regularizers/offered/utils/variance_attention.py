import torch
from torch import nn


def variance_gate(features, predicted):
    """Features times the sigmoid of their predicted variance (eq. 5), in the features' dtype."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    gate = torch.sigmoid(predicted.to(dtype))
    if features.ndim == 4:
        gate = gate.view(-1, 1, 1)
    # The product is in full precision, or the gradient of A, a sum over the batch, would be in half precision.
    return (features * gate).to(features.dtype)  # eq. 5


class VarianceAttention(nn.Module):
    """Implementation of the variance estimation module (VEM) of
    Second-Order Estimation Based Attention Network for Metric Learning
    """

    def __init__(self, num_features, *, init="normal"):
        super().__init__()
        if init not in ["normal", "zeros"]:
            raise ValueError(f"init: expected one of normal, zeros; got {init!r}")
        self.num_features = num_features
        self.init = init
        self.variance = nn.Parameter(torch.empty(num_features))
        self.reset_parameters()

    def reset_parameters(self):
        """Reset A, from torch's global generator."""
        if self.init == "normal":
            nn.init.normal_(self.variance)
        else:
            nn.init.zeros_(self.variance)

    def forward(self, features):
        axis, m = {2: 1, 3: 2, 4: 1}.get(features.ndim), self.num_features
        if axis is None or features.shape[axis] != m:
            raise ValueError(
                f"features: expected (N, {m}), (N, L, {m}) or (N, {m}, H, W), got shape {tuple(features.shape)}; "
                "pass num_features=... to match the network, and maps with their channels first"
            )
        return variance_gate(features, self.variance)
