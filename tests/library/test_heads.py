"""The head: every layout that a trunk may return, and the stages that losses read."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import EmbeddingHead, VEMAttention
from pml_regularizers.features.feature_tap import FeatureTap
from tests.support.tolerances import assert_close
from tests.support.toys import timm_model

CHANNELS, WIDTH = 5, 3


def head(**kwargs: Any) -> EmbeddingHead:
    return EmbeddingHead(CHANNELS, WIDTH, **kwargs).double()


def maps() -> Tensor:
    return torch.randn(4, CHANNELS, 2, 3, dtype=torch.float64)


def seen_by(module: nn.Module, run: Any) -> Any:
    """Features that a loss attached to the module would read."""
    tap = FeatureTap({"stage": module})
    return tap.take(run().detach())["stage"]


@pytest.mark.parametrize(
    ("pool", "pooled"),
    [("avg", lambda x: x.mean(dim=(2, 3))), ("max", lambda x: x.amax(dim=(2, 3)))],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_pools(pool: Any, pooled: Any, bias: bool, normalize: bool) -> None:
    made, x = head(pool=pool, bias=bias, normalize=normalize), maps()
    assert (made.fc.bias is not None) == bias
    expected = made.fc(pooled(x))
    if normalize:
        expected = F.normalize(expected)
        assert_close(made(x).norm(dim=1), torch.ones(4))
    assert_close(made(x), expected)


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
    assert torch.equal(seen_by(last.feature_map, lambda: last(nhwc)), x)


def test_the_layout_of_square_input_must_be_said() -> None:
    x = torch.randn(2, CHANNELS, 4, CHANNELS, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x: expected one axis of 5 channels.*pass data_format="):
        head()(x)
    first, last = head(data_format="NCHW"), head(data_format="NHWC")
    last.load_state_dict(first.state_dict())
    assert_close(last(x.permute(0, 2, 3, 1)), first(x))
    assert not torch.allclose(last(x), first(x))


@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix_tokens_are_left_out(prefix: int) -> None:
    made, x = head(num_prefix_tokens=prefix), torch.randn(2, prefix + 4, CHANNELS).double()
    assert_close(made(x), F.normalize(made.fc(x[:, prefix:].mean(dim=1))))
    assert torch.equal(seen_by(made.feature_map, lambda: made(x)), x[:, prefix:])
    made(maps())  # a map has no prefix tokens


def test_the_class_token_as_embedding_leaves_the_patches_as_features() -> None:
    made, x = head(num_prefix_tokens=2, pool="token"), torch.randn(2, 6, CHANNELS).double()
    assert_close(made(x), F.normalize(made.fc(x[:, 0])))
    assert torch.equal(seen_by(made.feature_map, lambda: made(x)), x[:, 2:])
    assert torch.equal(seen_by(made.pooled, lambda: made(x)), x[:, 0])


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("garbage", [0.0, 1e9, -1e9, float("inf"), float("nan")])
def test_a_mask_drops_tokens_whatever_they_hold(pool: Any, garbage: float) -> None:
    made, x = head(pool=pool, num_prefix_tokens=1), torch.randn(3, 5, CHANNELS).double()
    kept = torch.tensor([[True] * 4, [True, False, True, False], [False] * 3 + [True]])
    expected = torch.cat(
        [
            made(torch.cat([tokens[:1], tokens[1:][keep]]).unsqueeze(0))
            for tokens, keep in zip(x, kept, strict=True)
        ]
    )
    x[:, 1:] = x[:, 1:].masked_fill(~kept.unsqueeze(2), garbage)
    x.requires_grad_()
    embeddings = made(x, kept)
    assert_close(embeddings, expected)
    embeddings.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    tokens, mask = seen_by(made.feature_map, lambda: made(x, kept))
    assert tokens.shape == (3, 4, CHANNELS) and mask is kept


def test_stopgrad_embeddings_send_their_gradient_to_the_linear_layer_only() -> None:
    made, x = head(bias=True), maps().requires_grad_()
    tap = FeatureTap({"stage": made.stopgrad_embeddings})
    embeddings = made(x)
    stopped = tap.take(embeddings)["stage"]
    assert isinstance(stopped, Tensor)
    assert torch.equal(stopped, embeddings) and stopped.requires_grad
    (stopped * torch.randn_like(stopped)).sum().backward()
    assert x.grad is None
    for parameter in made.fc.parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0


def test_stopgrad_embeddings_are_computed_on_demand_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, calls = head(), maps(), []
    made.fc.register_forward_hook(lambda *_: calls.append(1))
    made(x)
    assert len(calls) == 1
    tap = FeatureTap({"stage": made.stopgrad_embeddings})
    made(x)
    assert len(calls) == 3
    tap.remove()
    made(x)
    assert len(calls) == 4


class Squeeze(nn.Module):
    """An attention that depends on its input, so that no linear layer can do its work."""

    def forward(self, pooled: Tensor) -> Tensor:
        return pooled * torch.sigmoid(pooled)


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_attention_stands_between_the_pooled_features_and_the_linear_layer(pool: Any) -> None:
    made, x = head(attention=Squeeze(), pool=pool), maps()
    pooled = seen_by(made.pooled, lambda: made(x))
    assert_close(pooled, x.mean(dim=(2, 3)) if pool == "avg" else x.amax(dim=(2, 3)))
    assert_close(made(x), F.normalize(made.fc(pooled * torch.sigmoid(pooled))))
    assert torch.equal(seen_by(made.feature_map, lambda: made(x)), x)


def test_attention_may_be_made_for_the_width_of_the_head() -> None:
    assert head().attention is None
    given = VEMAttention(CHANNELS)
    assert EmbeddingHead(CHANNELS, WIDTH, attention=given).attention is given
    made = EmbeddingHead(CHANNELS, WIDTH, attention=functools.partial(VEMAttention, init="zeros"))
    assert isinstance(made.attention, VEMAttention) and (made.attention.variance == 0).all()
    trunk = timm_model("test_vit", num_classes=0, global_pool="", img_size=32)
    fitted = EmbeddingHead.for_trunk(trunk, WIDTH, attention=VEMAttention)
    assert fitted.attention.num_features == trunk.num_features
    assert fitted(trunk(torch.randn(2, 3, 32, 32))).shape == (2, WIDTH)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_fold(bias: bool, normalize: bool) -> None:
    made, x = head(attention=VEMAttention, bias=bias, normalize=normalize), maps()
    embeddings = made(x)
    assert made.fold() is made and made.attention is None
    torch.testing.assert_close(made(x), embeddings, rtol=0, atol=1e-12)
    assert not any(isinstance(module, VEMAttention) for module in made.modules())
    plain = head(bias=bias, normalize=normalize)
    plain.load_state_dict(made.state_dict())
    assert torch.equal(plain(x), made(x))


def test_fold_needs_an_attention_that_can() -> None:
    with pytest.raises(ValueError, match=r"attention: expected one with .* got NoneType"):
        head().fold()
    made = head(attention=Squeeze())
    with pytest.raises(ValueError, match=r"fold\(linear\), .* got Squeeze; keep the head"):
        made.fold()
    assert isinstance(made.attention, Squeeze)


TRUNKS: dict[str, tuple[dict[str, Any], int, Any]] = {
    "mobilenetv3_small_050": ({}, 64, "map"),  # its maps are wider than its num_features
    "test_resnet": ({}, 32, "map"),
    "test_convnext": ({}, 32, "map"),
    "test_vit": ({"img_size": 32}, 32, "tokens"),
    "test_vit2": ({"img_size": 32}, 32, "tokens"),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 56, "depths": (1, 1), "embed_dim": 8, "num_heads": (1, 2)},
        56,
        "map",
    ),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_timm_trunks(name: str) -> None:
    kwargs, size, kind = TRUNKS[name]
    trunk = timm_model(name, num_classes=0, global_pool="", **kwargs).eval()
    made = EmbeddingHead.for_trunk(trunk, WIDTH)
    output = trunk(torch.randn(2, 3, size, size))
    features = seen_by(made.feature_map, lambda: made(output))
    prefix = getattr(trunk, "num_prefix_tokens", 0)
    if kind == "map":
        assert features.ndim == 4 and features.shape[1] == made.in_channels
        channels_last = name.startswith("swin")
        assert torch.equal(features.permute(0, 2, 3, 1) if channels_last else features, output)
    else:
        assert prefix > 0 or name != "test_vit"
        assert torch.equal(features, output[:, prefix:])
        assert features.shape[1] == (size // 16) ** 2
    embeddings = made(output)
    assert embeddings.shape == (2, WIDTH)
    embeddings.sum().backward()
    first = next(trunk.parameters())
    assert first.grad is not None and first.grad.abs().max() > 0


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_an_image_without_a_token_that_counts_is_zero_and_spoils_no_other(pool: Any) -> None:
    head = EmbeddingHead(CHANNELS, WIDTH, pool=pool)
    tokens = torch.randn(2, 4, CHANNELS)
    mask = torch.tensor([[True] * 4, [False] * 4])
    embeddings = head(tokens, mask)
    embeddings.sum().backward()
    assert_close(embeddings[:1], head(tokens[:1]))
    assert (embeddings[1] == 0).all()
    assert head.fc.weight.grad.isfinite().all()


def test_half_precision_survives_dead_maps_and_long_masked_averages() -> None:
    head = EmbeddingHead(CHANNELS, WIDTH).half()
    assert (head(torch.zeros(1, CHANNELS, 2, 2).half()) == 0).all()
    tokens = torch.full((1, 300, CHANNELS), 300.0).half()
    mask = torch.ones(1, 300, dtype=torch.bool)
    assert_close(head(tokens, mask), head(tokens))
