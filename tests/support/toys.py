"""Small networks and batches that the tests train and break."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pml_regularizers import EmbeddingHead, VEMAttention

CHANNELS, WIDTH = 6, 4


class Trunk(nn.Sequential):
    """Images (N, 3, S, S) -> maps (N, 6, S/2, S/2)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(8, CHANNELS, 1)
        )


class Network(nn.Module):
    """Images (N, 3, S, S) -> embeddings (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = EmbeddingHead(CHANNELS, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.head(self.trunk(images))
        return embeddings


class Attended(Network):
    """The same with an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.head = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention)


def images(count: int = 8) -> tuple[Tensor, Tensor]:
    """Images and labels, two images per class."""
    return torch.randn(count, 3, 8, 8), torch.arange(count) // 2


def timm_model(name: str, **settings: Any) -> Any:
    """A model of timm's; without timm, which the library does not need, the test is skipped."""
    return pytest.importorskip("timm").create_model(name, **settings)
