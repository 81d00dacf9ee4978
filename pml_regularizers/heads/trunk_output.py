"""Width and layout of a trunk's features, from a trial forward pass.

What a network states about itself is not enough: timm's MobileNetV3 has 576 `num_features` and gives maps of 1,024
channels, Swin gives channels-last maps, and a network of your own states nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.checks import came, check_module


class TrunkOutput(NamedTuple):
    """What a trunk gives for an image."""

    channels: int
    data_format: Literal["NCHW", "NHWC", "NLC"]
    num_prefix_tokens: int = 0  # class and register tokens, which stand first


def trunk_output(trunk: nn.Module, image: Tensor | None = None) -> TrunkOutput:
    """Width and layout of a trunk's features; arguments and errors are those of `EmbeddingHead.for_trunk`.

    The prefix tokens that a trunk does not state as `num_prefix_tokens` are those that are left over from a square.

    Example:
        >>> trunk_output(nn.Conv2d(3, 8, 3))
        TrunkOutput(channels=8, data_format='NCHW', num_prefix_tokens=0)
    """
    check_module("trunk", trunk)
    image = trial_image(trunk) if image is None else image
    if not isinstance(image, Tensor) or image.shape[:1] != (1,):
        raise ValueError(
            f"image: expected one in a batch, (1, 3, H, H) or (1, L), got {came(image)}; pass image[None]"
        )
    output = layout(last_hidden_state(try_out(trunk, image)), trunk)
    if _are_pixels(image) or hasattr(trunk, "num_prefix_tokens"):
        return output
    return output._replace(num_prefix_tokens=0)  # a text is no square


def layout(features: Any, network: nn.Module) -> TrunkOutput:
    """Width and layout of the features (1, ...) that a network gives for a square image."""
    shape: tuple[int, ...] = tuple(features.shape) if isinstance(features, Tensor) else ()
    if len(shape) == 3:
        _, tokens, channels = shape
        prefix = getattr(network, "num_prefix_tokens", tokens - isqrt(tokens) ** 2)
        return TrunkOutput(channels, "NLC", prefix)
    if len(shape) != 4:
        named = not isinstance(features, (Tensor, list, tuple))  # as Hugging Face's outputs are
        way_out = 'make it with global_pool="" (timm), or return its last map'
        raise ValueError(
            f"trunk: expected a map (N, C, H, W) or tokens (N, L, C) from {type(network).__name__}, got "
            f"{shape or type(features).__name__}{', pooled already' if len(shape) == 2 else ''}; "
            f"{'take the model without a head, such as ViTModel' if named else way_out}"
        )
    # The map of a square image is square.
    first, last = shape[2] == shape[3], shape[1] == shape[2]
    if first == last:
        last = getattr(network, "output_fmt", "NCHW") == "NHWC"
    return TrunkOutput(shape[3], "NHWC") if last else TrunkOutput(shape[1], "NCHW")


def last_hidden_state(output: Any) -> Any:
    """The features in an output of Hugging Face's models; any other output as it is."""
    return getattr(output, "last_hidden_state", output)


@contextmanager
def evaluating(*networks: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; the mode of each module is restored."""
    modes = {module: module.training for network in networks for module in network.modules()}
    try:
        for network in networks:
            network.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def as_taken(x: Tensor, parameter: Tensor) -> Tensor:
    """A network's input, on the device of its parameters and in their precision; token numbers stay integers."""
    return x.to(parameter.device, parameter.dtype if _are_pixels(x) else x.dtype)


def _are_pixels(x: Tensor) -> bool:
    return x.is_floating_point() or x.dtype == torch.uint8


def try_out(network: nn.Module, x: Tensor) -> Any:
    """The output of a network for a trial input."""
    own = next(network.parameters(), x)
    try:
        with evaluating(network):
            return network(as_taken(x, own))
    except Exception as error:
        way_out = "pass image=..., an image as it takes them"
        if (width := _text_width(network)) is not None:
            way_out = (
                f"it reads text: write head = EmbeddingHead({width}, E), and embed its tokens with "
                "head(output.last_hidden_state, attention_mask)"
            )
        raise ValueError(
            f"trunk: {type(network).__name__} fails for a trial input {tuple(x.shape)} ({error}); {way_out}"
        ) from error


def _text_width(network: nn.Module) -> int | None:
    """Width of the tokens of a text encoder of Hugging Face's; None for another network."""
    config = getattr(network, "config", None)
    text = hasattr(config, "vocab_size") and not hasattr(config, "image_size")
    return getattr(config, "hidden_size", None) if text else None


def trial_image(network: nn.Module) -> Tensor:
    """A black square image of the size that a network states, for its first convolution, or with three channels."""
    size = (
        getattr(getattr(network, "patch_embed", None), "img_size", None)  # timm, as it was made
        or getattr(getattr(network, "config", None), "image_size", None)  # Hugging Face
        or (getattr(network, "pretrained_cfg", None) or {}).get("input_size", 224)  # timm
    )
    side = size if isinstance(size, int) else size[-1]
    taken = (module.in_channels for module in network.modules() if isinstance(module, nn.Conv2d))
    channels = next(taken, 3)
    return torch.zeros(1, channels if channels <= 4 else 3, side, side)
