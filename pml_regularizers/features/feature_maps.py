"""Feature maps: features at an image's positions, as maps or as tokens, and the networks that have them."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ..functional.checks import came, floating
from ..functional.precision import full_precision

HEADS: WeakSet[nn.Module] = WeakSet()
"""The modules whose children are stages, and which return the embeddings themselves."""


class FeatureModule(nn.Module):
    """A network, or the end of one, that returns embeddings: a loss attaches to its children by their names."""

    def __init__(self) -> None:
        super().__init__()
        HEADS.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        HEADS.add(self)  # a copy


def to_tokens(features: Tensor | tuple[Tensor, ...], channels: int) -> tuple[Tensor, Tensor | None]:
    """A feature map (N, C, H, W), tokens (N, L, C) or (tokens, mask) -> features (N, P, C) and mask (N, P).

    Raises:
        ValueError: for any other shape, another number of channels, or a mask that does not fit.
    """
    mask = None
    first_tensor(features)
    if isinstance(features, tuple):
        if len(features) != 2:
            raise ValueError(
                f"features: expected a tensor or the pair (tokens, mask), got a tuple of {len(features)}; pass "
                "the one to read, or attach to a module that returns it alone"
            )
        features, mask = features
        fits = (
            isinstance(mask, Tensor)
            and mask.shape == features.shape[:2]
            and not (mask.is_floating_point() or mask.is_complex())
        )
        if features.ndim != 3 or not (fits or mask is None):
            raise ValueError(
                "features: expected tokens (N, L, C) with a boolean mask (N, L), or of 0 and 1, got "
                f"{came(features)} and {came(mask)}; pass attention_mask, with a number for each of the L tokens"
            )
        mask = None if mask is None else mask != 0  # transformers' are integers
    # Through flatten(2), one image's gradient would come back with strides for which torch's batch norm on a CPU
    # has a wrong gradient, without an error.
    x = features.permute(0, 2, 3, 1).flatten(1, 2) if features.ndim == 4 else features
    if x.ndim != 3 or x.shape[2] != channels:
        way_out = "; pass in_channels=... to match the trunk"
        if features.ndim == 4 and features.shape[3] == channels:
            way_out = (
                ", channels last as Swin's; attach to an EmbeddingHead, or pass "
                "features=feature_map.permute(0, 3, 1, 2)"
            )
        elif x.ndim == 2:
            way_out = (
                ', pooled already; make the trunk with global_pool="" (timm), or attach the loss to a layer '
                "before the pooling"
            )
        raise ValueError(
            f"features: expected a map (N, {channels}, H, W) or tokens (N, L, {channels}), got shape "
            f"{tuple(features.shape)}{way_out}"
        )
    if x.shape[1] == 0:
        raise ValueError(
            f"features: expected at least one position per image, got shape {tuple(features.shape)}; take larger "
            "images, or an earlier stage"
        )
    return x, mask


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of x (N, P, D) over the positions P that the mask (N, P) keeps; the others may hold NaN -> (N, D)."""
    if mask is None:
        return x.mean(dim=1)
    kept = mask.sum(dim=1, keepdim=True).clamp(min=1)
    total = full_precision(x).masked_fill(~mask.unsqueeze(2), 0).sum(dim=1)
    return (total / kept).to(x.dtype)


def pooled_map(features: Any, channels_last: bool) -> Tensor:
    """The average over positions of a map or of tokens, with an optional mask; pooled features as they are."""
    x = first_tensor(features)
    if x.ndim == 4:
        square = x.shape[1] == x.shape[2] != x.shape[3]  # the map of a square image
        return x.mean((1, 2) if channels_last or square else (2, 3))
    if x.ndim == 3:
        return masked_mean(*to_tokens(features, x.shape[2]))
    return x


def first_tensor(features: Any) -> Tensor:
    """The tensor itself, or the first of a tuple; a ValueError for anything else."""
    first = features[0] if isinstance(features, tuple) and features else features
    if isinstance(first, Tensor):
        return first
    way_out = "attach the loss to a module that returns its features"
    if isinstance(features, Mapping):  # Hugging Face's ModelOutput is one
        name = floating(features, "last_hidden_state", "token_embeddings")
        way_out = f"pass features=output.{name}, or attach the loss to a module that returns the tensor alone"
        if name in ("last_hidden_state", "token_embeddings"):
            way_out = (
                f"pass features=(output.{name}, attention_mask), where the loss reads positions, or their average, "
                f'or attach to the module in it that returns {name}, pool="avg" where pooled features are read'
            )
    raise ValueError(
        f"features: expected a tensor or a tuple of tensors, got {type(features).__name__}; {way_out}"
    )
