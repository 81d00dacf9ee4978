"""Stands in for Hugging Face's transformers: vision models whose outputs are dataclasses, as theirs."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class ModelOutput:
    """Like `BaseModelOutputWithPooling`: attributes, no tensor."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None


class ViTModel(nn.Module):
    """Patches with a class token before them."""

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(3, config.hidden_size, 16, stride=16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, config.hidden_size))

    def forward(self, pixel_values: Tensor) -> ModelOutput:
        side = self.config.image_size
        if pixel_values.shape[-2:] != (side, side):
            raise ValueError(f"Input image size doesn't match model ({side}*{side}).")
        patches = self.patches(pixel_values).flatten(2).transpose(1, 2)
        token = self.cls_token.expand(len(patches), -1, -1)
        return ModelOutput(torch.cat([token, patches], dim=1))


class ResNetModel(nn.Module):
    """Maps, and their means as `pooler_output`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.stages = nn.Conv2d(3, config.hidden_sizes[-1], 3, stride=32)

    def forward(self, pixel_values: Tensor) -> ModelOutput:
        maps = self.stages(pixel_values)
        return ModelOutput(maps, maps.mean((2, 3), keepdim=True))


ConvNextModel = ResNetModel
ViTConfig = ResNetConfig = ConvNextConfig = SimpleNamespace  # any settings
