"""Cutting a trunk in two."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import AttentionEnsemble, split_trunk
from tests.support.tolerances import assert_close
from tests.support.toys import timm_model


class Skips(nn.Module):
    """Two layers, the second one scaled, and a connection beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.second(x) * self.scale + x
        return y


class Branches(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("name", "stage"), [("test_resnet", "layer3.0"), ("test_efficientnet", "blocks.2")]
)
def test_timm_trunks_are_cut_anywhere(name: str, stage: str) -> None:
    trunk = timm_model(name, num_classes=0).eval()
    stem, body = split_trunk(trunk, stage)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(body(stem(x)), trunk.forward_features(x))
    names = [{name for name, _ in part.named_parameters()} for part in (stem, body)]
    assert not names[0] & names[1] and all(names)
    for part in (stem, body):
        assert not part.training
        assert all(trunk.get_parameter(name) is own for name, own in part.named_parameters())


def test_cuts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"stage: .* got 'third', called 0 times; it calls first"):
        split_trunk(Skips(), "third")
    with pytest.raises(ValueError, match=r"stage: add also needs first from before 'second'"):
        split_trunk(Skips(), "second")
    x, trunk = torch.randn(1, 3, 4, 4), nn.Sequential(Skips())
    stem, body = split_trunk(trunk, "0.first")
    assert torch.equal(body(stem(x)), trunk(x))
    with pytest.raises(ValueError, match=r"trunk: torch\.fx cannot trace Branches"):
        split_trunk(Branches(3, 3, 1), "anything")


class Modal(nn.Module):
    """A network that asks in its own forward whether it is in training."""

    def __init__(self, change: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), change

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.change(self.first(x), self.training))
        return x * torch.tensor([2.0])


CHANGES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout": lambda x, training: F.dropout(x, 0.5, training),
    "constant": lambda x, training: x * torch.tensor([0.5 if training else 1.0]),
    "more": lambda x, training: x + x.abs() if training else x,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_cut_does_not_freeze_the_mode_of_a_trunk(change: str, training: bool) -> None:
    trunk = Modal(CHANGES[change]).train(training)
    trunk.second.eval()
    with pytest.raises(ValueError, match="trunk: Modal computes different things in tr"):
        split_trunk(trunk, "first")
    assert trunk.training == trunk.first.training == training and not trunk.second.training


def test_an_ensemble_of_a_timm_trunk() -> None:
    trunk = timm_model("test_convnext", num_classes=0)
    made = AttentionEnsemble.for_trunk(trunk, "stages.1", embedding_size=16, num_heads=4)
    assert (made.mask.in_channels, made.head.in_channels) == (32, trunk.num_features)
    x = torch.randn(2, 3, 64, 64)
    assert made(x).shape == (2, 16)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert_close(again(x), made(x))
    made(x).sum().backward()
    assert all(p.grad is not None for p in made.parameters())


def test_the_layers_of_the_masks_may_be_a_copy_of_the_body() -> None:
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 7, 1), nn.Conv2d(7, 5, 3))
    made = AttentionEnsemble.for_trunk(
        trunk, "0", attention_stage="1", embedding_size=1, num_heads=1
    )
    assert (made.mask.in_channels, made.head.in_channels) == (7, 5)
    copied, own = dict(made.attention.named_parameters()), dict(made.body.named_parameters())
    assert set(copied) == {"1.weight", "1.bias"} < set(own)
    assert torch.equal(copied["1.weight"], own["1.weight"])
    assert copied["1.weight"] is not own["1.weight"]
    assert made(torch.randn(2, 3, 6, 6)).shape == (2, 1)


def test_channels_last_maps_are_not_cut() -> None:
    sizes = {"img_size": 56, "depths": (1, 1), "embed_dim": 8, "num_heads": (1, 2)}
    trunk = timm_model("swin_tiny_patch4_window7_224", num_classes=0, global_pool="", **sizes)
    with pytest.raises(ValueError, match=r"stage: expected maps \(N, C, H, W\) at 'layers.0'"):
        AttentionEnsemble.for_trunk(trunk, "layers.0")
