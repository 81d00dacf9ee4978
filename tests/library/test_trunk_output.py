"""Width and layout of trunks: hand-made ones and timm's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pml_regularizers import EmbeddingHead
from pml_regularizers.heads.trunk_output import TrunkOutput, trial_image, trunk_output
from tests.support.toys import timm_model


class Fixed(nn.Module):
    """Gives features of one shape for any image, or for images of one size."""

    def __init__(self, *shape: int, side: int | None = None, **stated: Any) -> None:
        super().__init__()
        self.shape, self.side = shape, side
        self.__dict__.update(stated)

    def forward(self, images: Tensor) -> Tensor:
        if self.side not in (None, images.shape[-1]):
            raise RuntimeError(f"expected {self.side} pixels")
        return torch.zeros(len(images), *self.shape)


class Hugging(Fixed):
    """Like the vision models of Hugging Face's transformers."""

    def forward(self, images: Tensor) -> Any:
        name = "logits" if "logits" in vars(self) else "last_hidden_state"
        return SimpleNamespace(**{name: super().forward(images)})


@pytest.mark.parametrize(
    ("trunk", "expected"),
    [
        (Fixed(7, 3, 3), (7, "NCHW", 0)),
        (Fixed(3, 3, 7), (7, "NHWC", 0)),
        (Fixed(3, 3, 3), (3, "NCHW", 0)),
        (Fixed(3, 3, 3, output_fmt="NHWC"), (3, "NHWC", 0)),
        (Fixed(197, 5), (5, "NLC", 1)),
        (Fixed(200, 5, num_prefix_tokens=4), (5, "NLC", 4)),
        (Hugging(201, 5, side=98, config=SimpleNamespace(image_size=98)), (5, "NLC", 5)),
        (nn.Conv2d(1, 9, 3), (9, "NCHW", 0)),
        (nn.Conv2d(3, 9, 3, dtype=torch.float64, device="meta"), (9, "NCHW", 0)),
    ],
)
def test_by_hand(trunk: nn.Module, expected: tuple[Any, ...]) -> None:
    assert trunk_output(trunk) == TrunkOutput(*expected)


@pytest.mark.parametrize(
    ("trunk", "message"),
    [
        (Fixed(7), r"trunk: expected a map .* got \(1, 7\), pooled already; make it with global_p"),
        (Hugging(7, logits=True), r"got SimpleNamespace; take the model without a head"),
        (Fixed(7, 1, 1, 1), r"trunk: expected a map .* from Fixed, got \(1, 7, 1, 1, 1\)$"),
        (Fixed(7, 3, 3, side=64), r"trunk: Fixed fails .* \(expected 64 pixels\); pass image="),
    ],
)
def test_no_trunk(trunk: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingHead.for_trunk(trunk, 4)


def test_an_image_of_ones_own() -> None:
    made = EmbeddingHead.for_trunk(Fixed(7, 3, 3, side=64), 4, image=torch.zeros(1, 3, 64, 64))
    assert (made.in_channels, made.data_format) == (7, "NCHW")


def test_outputs_of_hugging_face_are_embedded() -> None:
    trunk = Hugging(5, 6)
    made = EmbeddingHead.for_trunk(trunk, 4)
    assert (made.num_prefix_tokens, made.data_format) == (1, "auto")
    assert made(trunk(torch.zeros(2, 3, 8, 8))).shape == (2, 4)


def test_the_trial_changes_nothing() -> None:
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.BatchNorm2d(4))
    trunk[3].eval()
    modes = [module.training for module in trunk.modules()]
    state = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    trunk_output(trunk)
    assert [module.training for module in trunk.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in trunk.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "shape"), [({"in_chans": 1, "img_size": 48}, (1, 48, 48)), ({}, (3, 160, 160))]
)
def test_images_of_the_size_and_channels_of_a_model(settings: Any, shape: Any) -> None:
    trunk = timm_model("test_vit", num_classes=0, global_pool="", **settings)
    assert trial_image(trunk).shape == (1, *shape)
    assert trunk_output(trunk) == TrunkOutput(64, "NLC", 1)
