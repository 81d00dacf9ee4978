"""A pass of one image has that image's share of the gradient, whatever layer comes before what is read.

On a CPU, torch's batch norm of one image has wrong gradients for some strides of the gradient that comes back.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pml_regularizers import EmbeddingHead, HighOrderMoments, VEMAttention

C = 4
NORM = nn.BatchNorm2d(C)
LAYERS = (
    *(nn.Sequential(NORM, x()) for x in (nn.Identity, nn.SiLU, nn.Softplus, nn.Hardswish, nn.ReLU)),
    *(nn.GroupNorm(2, C), nn.Conv2d(C, C, 2), nn.Conv2d(C, C, 2, groups=C)),
)


class Masked(EmbeddingHead):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        tokens = x.permute(0, 2, 3, 1).flatten(1, 2)
        return super().forward(tokens, (torch.arange(tokens.shape[1]) < 3).expand(len(x), -1))


def moments(projections: Any) -> nn.Module:
    return HighOrderMoments(C, order=3, moment_dim=8, projections=projections)


READERS = (
    *(EmbeddingHead(C, 2), EmbeddingHead(C, 2, pool="max"), Masked(C, 2)),
    EmbeddingHead(C, 2, attention=VEMAttention),
    *map(moments, ("cascaded", "independent", "random", "sketch")),
)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_image(layer: nn.Module) -> None:
    NORM.running_var.uniform_(0.5, 2), NORM.running_mean.normal_(), NORM.weight.data.normal_()
    trunk = nn.Sequential(nn.Conv2d(3, C, 2), layer).double().eval()
    x = torch.randn(3, 3, 5, 7, dtype=torch.float64)
    for reader in READERS:
        gradients = []
        for size in (3, 1):
            trunk.zero_grad()
            for chunk in x.split(size):
                y = reader.double()(trunk(chunk))
                y = torch.cat(y, dim=1) if isinstance(y, list) else y
                (y * torch.arange(y.shape[1])).sum().backward()
            gradients.append([parameter.grad for parameter in trunk.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
        assert gradients[0][0].any()
