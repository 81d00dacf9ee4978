"""A trunk whose lower stages are frozen: their outputs can be kept, and only the rest is run and trained."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.console.printing import reason
from benchmarks.settings.errors import ConfigError
from pml_regularizers.heads.split_trunk import split_trunk


class FrozenStages:
    """The lower stages of a timm trunk, frozen, and the rest: trunk(x) = upper(lower(x)).

    The stem is frozen with the first stage. Frozen means: no gradients, batch norm and dropout as in evaluation.

    Args:
        trunk: A timm model without classifier and pooling.
        stages: Number of stages to freeze, as timm groups the model's layers.
        image: (N, C, S, S), one or more images of the size that the trunk will see.

    Attributes:
        frozen: The frozen stages; their weights have the trunk's names.

    The trunk is left in evaluation mode.
    """

    def __init__(self, trunk: nn.Module, stages: int, image: Tensor) -> None:
        names, kind = stage_names(trunk), type(trunk).__name__
        if not 0 < stages < len(names):
            raise ConfigError(
                f"model.frozen_stages: timm's stages of {kind}: {', '.join(names) or 'none'}; the last one must "
                f"train, got {stages}"
            )
        self.trunk: Any = trunk
        self._behind = names[stages - 1]
        self._kept = torch.Size()  # the shape of an output, without the batch
        try:
            self.cut()
        except ValueError as error:
            raise ConfigError(
                f"model.frozen_stages: {kind} cannot be cut behind {self._behind}: {reason(error)}"
            ) from error
        self.frozen.requires_grad_(False)
        trunk.eval()
        with torch.no_grad():
            maps = self.lower(image)
            whole, joined = trunk(image), self.upper(maps)
        self._kept = maps.shape[1:]
        if whole.shape != joined.shape or not torch.allclose(whole, joined, rtol=1e-4, atol=1e-5):
            raise ConfigError(
                f"model.frozen_stages: {kind} cut behind {self._behind} computes something else; freeze none"
            )

    def cut(self) -> None:
        """Cut again, after layers of the trunk were replaced."""
        self.frozen, self._rest = split_trunk(self.trunk, self._behind)
        # Without a backward pass this layout is the faster one, also where it is slower for the rest.
        self.frozen.to(memory_format=torch.channels_last)

    def lower(self, images: Tensor) -> Tensor:
        """The output of the frozen stages, without a graph; such an output itself stays as it is."""
        if images.shape[1:] == self._kept:
            return images
        with torch.no_grad():
            output: Tensor = self.frozen(images.contiguous(memory_format=torch.channels_last))
        return output.contiguous()

    def upper(self, maps: Tensor) -> Tensor:
        """The trunk's output for an output of the frozen stages."""
        features: Tensor = self._rest(maps)
        if hasattr(self.trunk, "forward_head"):  # split_trunk cuts timm's forward_features
            features = self.trunk.forward_head(features)
        return features


def stage_names(trunk: Any) -> list[str]:
    """The modules behind which the stages of a timm model end, from below."""
    groups = trunk.group_matcher(coarse=True) if hasattr(trunk, "group_matcher") else None
    blocks = groups["blocks"] if isinstance(groups, dict) else []
    patterns = [blocks] if isinstance(blocks, str) else [pattern for pattern, _ in blocks]
    numbered = "|".join(pattern for pattern in patterns if "(" in pattern)
    return [name for name, _ in trunk.named_modules() if name and re.fullmatch(numbered, name)]
