"""The head: every layout that a trunk may return, how it is found, and the stages that losses read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import EmbeddingHead
from pml_regularizers.features.feature_tap import FeatureTap
from pml_regularizers.heads.trunk_output import TrunkOutput, trial_image, trunk_output
from tests.support.tolerances import assert_close
from tests.support.toys import timm_model

CHANNELS, WIDTH = 5, 3


def head(**kwargs: Any) -> EmbeddingHead:
    return EmbeddingHead(CHANNELS, WIDTH, **kwargs).double()


def maps() -> Tensor:
    return torch.randn(4, CHANNELS, 2, 3, dtype=torch.float64)


def seen_at(stage: str, made: EmbeddingHead, *inputs: Tensor) -> Any:
    """Features that a loss attached to a stage of the head would read."""
    tap = FeatureTap({stage: getattr(made, stage)})
    return tap.take(made(*inputs).detach())[stage]


@pytest.mark.parametrize(
    ("pool", "pooled"),
    [("avg", lambda x: x.mean(dim=(2, 3))), ("max", lambda x: x.amax(dim=(2, 3)))],
)
def test_pools(pool: Any, pooled: Any) -> None:
    made, raw, x = head(pool=pool), head(pool=pool, bias=True, normalize=False), maps()
    assert made.fc.bias is None and raw.fc.bias is not None
    assert_close(made(x), F.normalize(made.fc(pooled(x))))
    assert_close(raw(x), raw.fc(pooled(x)))


@pytest.mark.parametrize(("init", "bound"), [("uniform", 1 / 400), ("glorot", 6 / (400 + 200))])
def test_the_linear_layer_starts_uniform_within_its_bound(init: Any, bound: float) -> None:
    weight = EmbeddingHead(400, 200, init=init).fc.weight.detach()
    assert 0.99 * bound**0.5 < weight.abs().max() <= bound**0.5
    assert weight.square().mean().item() == pytest.approx(bound / 3, rel=0.02)


@pytest.mark.parametrize("data_format", ["auto", "NHWC"])
def test_channels_last_maps_are_the_same_maps(data_format: Any) -> None:
    made, x = head(), maps()
    last = head(data_format=data_format)
    last.load_state_dict(made.state_dict())
    nhwc = x.permute(0, 2, 3, 1)
    assert torch.equal(last(nhwc), made(x))
    assert torch.equal(seen_at("feature_map", last, nhwc), x)


def test_the_layout_of_square_input_must_be_said() -> None:
    x = torch.randn(2, CHANNELS, 4, CHANNELS, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x: expected one axis of 5 channels.*pass data_format="):
        head()(x)
    first, last = head(data_format="NCHW"), head(data_format="NHWC")
    last.load_state_dict(first.state_dict())
    assert_close(last(x.permute(0, 2, 3, 1)), first(x))
    assert not torch.allclose(last(x), first(x))


def test_prefix_tokens_are_no_features_also_if_one_is_embedded() -> None:
    x = torch.randn(2, 7, CHANNELS).double()
    for pool, pooled in (("avg", x[:, 3:].mean(dim=1)), ("token", x[:, 0])):
        made = head(num_prefix_tokens=3, pool=pool)
        assert_close(made(x), F.normalize(made.fc(pooled)))
        assert torch.equal(seen_at("feature_map", made, x), x[:, 3:])
        assert torch.equal(seen_at("pooled", made, x), pooled)
    head(num_prefix_tokens=3)(maps())  # a map has no prefix tokens


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("garbage", [1e9, float("nan")])
def test_a_mask_drops_tokens_whatever_they_hold(pool: Any, garbage: float) -> None:
    """An image without a token that counts is zero."""
    made, x = head(pool=pool, num_prefix_tokens=1), torch.randn(3, 5, CHANNELS).double()
    kept = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    expected = torch.cat([made(x[:1]), made(x[1:2, [0, 1, 3]]), torch.zeros(1, WIDTH)])
    x[:, 1:] = x[:, 1:].masked_fill(~kept.unsqueeze(2), garbage)
    x.requires_grad_()
    embeddings = made(x, kept)
    assert_close(embeddings, expected)
    embeddings.sum().backward()
    assert x.grad.isfinite().all() and made.fc.weight.grad.isfinite().all()
    tokens, mask = seen_at("feature_map", made, x, kept)
    assert tokens.shape == (3, 4, CHANNELS) and mask is kept
    as_returned = F.pad(kept.long(), (1, 0), value=1)  # by transformers: integers, with the prefix
    assert torch.equal(made(x, as_returned), embeddings)


def test_stopgrad_embeddings_send_their_gradient_to_the_linear_layer_only() -> None:
    made, x = head(bias=True), maps().requires_grad_()
    tap = FeatureTap({"stage": made.stopgrad_embeddings})
    embeddings = made(x)
    stopped: Any = tap.take(embeddings)["stage"]
    assert torch.equal(stopped, embeddings)
    (stopped * torch.randn_like(stopped)).sum().backward()
    assert x.grad is None
    for parameter in made.fc.parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0


def test_attention_stands_between_the_pooled_features_and_the_linear_layer() -> None:
    made, x = head(attention=nn.SiLU()), maps()
    pooled = seen_at("pooled", made, x)
    assert_close(pooled, x.mean(dim=(2, 3)))
    assert_close(made(x), F.normalize(made.fc(pooled * torch.sigmoid(pooled))))


def test_half_precision_survives_dead_maps_and_long_masked_averages() -> None:
    head = EmbeddingHead(CHANNELS, WIDTH).half()
    assert (head(torch.zeros(1, CHANNELS, 2, 2).half()) == 0).all()
    tokens = torch.full((1, 300, CHANNELS), 300.0).half()
    mask = torch.ones(1, 300, dtype=torch.bool)
    assert_close(head(tokens, mask), head(tokens))


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


def test_trunks_made_by_hand() -> None:
    for trunk, expected in (
        (Fixed(7, 3, 3), (7, "NCHW", 0)),
        (Fixed(3, 3, 7), (7, "NHWC", 0)),
        (Fixed(3, 3, 3), (3, "NCHW", 0)),
        (Fixed(3, 3, 3, output_fmt="NHWC"), (3, "NHWC", 0)),
        (Fixed(197, 5), (5, "NLC", 1)),
        (Fixed(200, 5, num_prefix_tokens=4), (5, "NLC", 4)),
        (Hugging(201, 5, side=98, config=SimpleNamespace(image_size=98)), (5, "NLC", 5)),
        (nn.Conv2d(1, 9, 3), (9, "NCHW", 0)),
        (nn.Conv2d(3, 9, 3, dtype=torch.float64, device="meta"), (9, "NCHW", 0)),
    ):
        assert trunk_output(trunk) == TrunkOutput(*expected)


def test_outputs_that_are_no_map_and_no_tokens() -> None:
    for trunk, message in (
        (Fixed(7), r"trunk: expected a map .* got \(1, 7\), pooled already; make it with global_p"),
        (Hugging(7, logits=True), r"got SimpleNamespace; take the model without a head"),
        (Fixed(7, 1, 1, 1), r"trunk: expected a map .* from Fixed, got \(1, 7, 1, 1, 1\); make it"),
        (Fixed(7, 3, 3, side=64), r"trunk: Fixed fails .* \(expected 64 pixels\); pass image="),
    ):
        with pytest.raises(ValueError, match=message):
            EmbeddingHead.for_trunk(trunk, 4)


def test_outputs_of_hugging_face_are_embedded() -> None:
    """Found by an image of one's own."""
    trunk = Hugging(5, 6, side=8)
    made = EmbeddingHead.for_trunk(trunk, 4, image=torch.zeros(1, 3, 8, 8))
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
    assert trial_image(nn.Conv2d(5, 9, 3)).shape == (1, 3, 224, 224)  # of maps, registered first
