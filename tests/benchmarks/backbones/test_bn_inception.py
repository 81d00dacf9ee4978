"""BN-Inception: equal to the published network, and a timm model in every respect."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from benchmarks.backbones.bn_inception import BNInception, HalvingMaxPool, checkpoint_filter_fn
from tests.references import bn_inception as published
from tests.support.tolerances import assert_close

PARAMETERS = 11_295_240


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Random weights in the published layout."""
    torch.manual_seed(0)
    return published.random_weights()


@pytest.fixture(scope="module")
def weights_file(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "published.pth"
    torch.save(weights, path)
    return path


@pytest.fixture(scope="module")
def model(weights: dict[str, Tensor]) -> BNInception:
    """Model with these weights, in float64 and evaluation mode; do not change it."""
    model = empty()
    model.load_state_dict(checkpoint_filter_fn(weights, model), assign=True)
    return model


def create(**options: Any) -> BNInception:
    return timm.create_model("bn_inception", **options).eval()


def empty(**options: Any) -> BNInception:
    """Shapes without numbers, which takes no time."""
    with torch.device("meta"):
        return create(**options)


def pictures(height: int = 64, width: int = 64) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in pixels]


def images(size: int = 64, in_chans: int = 3) -> Tensor:
    return torch.randn(2, in_chans, size, size, dtype=torch.float64) * 60


def as_published(batch: list[Image.Image]) -> Tensor:
    """BGR in 0..255 less the mean."""
    rgb = torch.stack([torch.from_numpy(np.array(picture)) for picture in batch])
    mean = torch.tensor(published.MEAN_BGR, dtype=torch.float64)
    return (rgb.flip(-1) - mean).permute(0, 3, 1, 2)


def as_timm(model: nn.Module, batch: list[Image.Image]) -> Tensor:
    """timm's test transform for images of any size: no resizing, no crop."""
    config = resolve_model_data_config(model) | {"crop_pct": 1.0}
    config["input_size"] = (3, *batch[0].size[::-1])
    transform = create_transform(**config)
    return torch.stack([transform(picture) for picture in batch]).double()


# ------------------------------------------------------------------------- the published network


@pytest.mark.parametrize("size", [(64, 64), (32, 96)], ids=str)
def test_features_and_logits_equal_the_published_network(weights, model, size):
    batch = pictures(*size)
    ours, theirs = as_timm(model, batch), as_published(batch)
    # timm normalises in float32: that is all that the two inputs differ by.
    torch.testing.assert_close(ours, theirs.flip(1), rtol=0, atol=1e-4)
    ours = theirs.flip(1)
    with torch.no_grad():
        assert_close(model.forward_features(ours), published.features(weights, theirs))
        assert_close(model(ours), published.logits(weights, theirs))


def test_features_of_the_whole_pipeline_are_the_published_ones(weights_file, weights):
    model = create(pretrained=True, pretrained_cfg_overlay={"file": str(weights_file)})
    batch = pictures()
    with torch.no_grad():
        found = model.forward_features(as_timm(model, batch).float())
    expected = published.features(weights, as_published(batch))
    assert_close(found, expected)
    assert expected.std() > 0.1 * expected.mean()


@pytest.mark.parametrize("change", ["vectors", "fc", "counters"])
def test_the_published_layout_has_variants(weights, model, change):
    other = dict(weights)
    if change == "vectors":  # (C,) instead of (1, C)
        other = {
            name: value.squeeze(0) if "_bn." in name else value for name, value in other.items()
        }
    elif change == "fc":  # another name of the classifier
        other = {name.replace("last_linear", "fc"): value for name, value in other.items()}
    else:
        other["conv1_7x7_s2_bn.num_batches_tracked"] = torch.tensor(0)
    converted = checkpoint_filter_fn(other, model)
    own = model.state_dict()
    assert converted.keys() - {"features.conv1.bn.num_batches_tracked"} < own.keys()
    assert all(torch.equal(value, own[name]) for name, value in converted.items())


def test_weights_in_our_own_layout_pass_unchanged(model):
    own = model.state_dict()
    passed = checkpoint_filter_fn(own, model)
    assert all(passed[name] is value for name, value in own.items())


def test_what_the_published_layout_does_not_have_is_left_alone(weights, model):
    other = {"conv1_7x7_s2_scale.weight", "inception_9z_1x1.weight", "odd"}
    converted = checkpoint_filter_fn(weights | dict.fromkeys(other, torch.ones(1)), model)
    assert converted.keys() - model.state_dict().keys() == {
        "conv1_7x7_s2_scale.weight",
        "inception_9z_1x1.weight",
        "odd",
    }


def test_parameters_are_as_many_as_published(weights):
    assert sum(parameter.numel() for parameter in empty().parameters()) == PARAMETERS
    trained = [value for name, value in weights.items() if "running" not in name]
    assert sum(value.numel() for value in trained) == PARAMETERS


# ------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("size", [8, 7, 5, 1])
def test_halving_max_pool_rounds_up_and_sees_every_pixel(size):
    x = torch.randn(1, 2, size, size)
    pooled = HalvingMaxPool()(x)
    half = -(-size // 2)
    expected = [
        [x[..., 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].amax((-1, -2)) for j in range(half)]
        for i in range(half)
    ]
    assert torch.equal(pooled, torch.stack([torch.stack(row, -1) for row in expected], -2))


@pytest.mark.parametrize(("size", "side"), [(7, 1), (33, 1), (80, 3), (227, 7)])
def test_images_of_any_size(size, side):
    features = empty(num_classes=0).forward_features(torch.zeros(1, 3, size, size, device="meta"))
    assert features.shape == (1, 1024, side, side)


def test_images_of_any_size_have_finite_features(model):
    with torch.no_grad():
        assert model(images(47)).isfinite().all()


# ----------------------------------------------------------------------------------------- as timm


def test_classifier_and_pooling(model):
    x = images()
    trunk, pooled = empty(num_classes=0, global_pool=""), empty(num_classes=0)
    for other in (trunk, pooled):
        own = {name: value for name, value in model.state_dict().items() if "head" not in name}
        other.load_state_dict(own, assign=True)
    with torch.no_grad():
        expected = model.forward_features(x)
        assert torch.equal(trunk(x), expected)
        assert torch.equal(pooled(x), expected.mean((2, 3)))
        assert torch.equal(model.forward_head(expected), model(x))
    assert model.get_classifier().out_features == 1000
    assert isinstance(trunk.get_classifier(), nn.Identity)
    assert model.num_features == 1024


def test_features_only_are_the_last_maps_of_each_size(model):
    x = images()
    net = empty(features_only=True)
    net.load_state_dict(
        {
            name.replace("features.", "features_", 1): value
            for name, value in model.state_dict().items()
            if name.startswith("features")
        },
        assign=True,
    )
    with torch.no_grad():
        maps = net(x)
        assert torch.equal(maps[-1], model.forward_features(x))
    assert [tuple(one.shape[1:]) for one in maps] == [
        (channels, 64 // reduction, 64 // reduction)
        for channels, reduction in zip(
            net.feature_info.channels(), net.feature_info.reduction(), strict=True
        )
    ]
    assert net.feature_info.reduction() == [2, 4, 8, 16, 32]
    assert net.feature_info.module_name()[3] == "features.inception_4d"


def test_out_indices_cut_the_network():
    net = empty(features_only=True, out_indices=(1, 2))
    assert net.feature_info.channels() == [192, 320]
    assert not [name for name, _ in net.named_modules() if "inception_3c" in name]


@pytest.mark.parametrize("in_chans", [1, 4])
def test_other_numbers_of_channels_adapt_the_published_weights(weights_file, model, in_chans):
    overlay = {"file": str(weights_file)}
    other = create(pretrained=True, pretrained_cfg_overlay=overlay, in_chans=in_chans)
    rgb = model.features.conv1.conv.weight.float()
    found = other.features.conv1.conv.weight
    expected = rgb.sum(1, keepdim=True) if in_chans == 1 else rgb[:, [0, 1, 2, 0]] * 3 / 4
    assert_close(found, expected.detach())


def test_other_numbers_of_classes_keep_the_published_features(weights_file, model):
    overlay = {"file": str(weights_file)}
    other = create(pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5)
    found = other.features.inception_5b["pool"].proj.bn.running_var
    assert_close(found, model.features.inception_5b["pool"].proj.bn.running_var)
    assert other.get_classifier().out_features == 5


def test_without_a_file_nothing_is_downloaded():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for bn_inception"):
        create(pretrained=True)


# ---------------------------------------------------------------------------------------- training


def gradients(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], int]:
    """Gradients by name, and the bytes kept for them."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().sum()
    loss.backward()
    return {name: value.grad for name, value in model.named_parameters()}, sum(kept.values())


def test_checkpointing_gives_the_same_gradients_for_less_memory(model):
    model = copy.deepcopy(model).train()
    model.head.reset(3)
    x = images(32)
    expected, whole = gradients(model, x)
    model.set_grad_checkpointing()
    found, less = gradients(model, x)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert value.any()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert less < 0.4 * (whole - weights)
    model.set_grad_checkpointing(False)
    assert gradients(model, x)[1] == whole


def test_evaluation_is_deterministic_and_image_by_image(model):
    x = images()
    with torch.no_grad():
        both = model(x)
        assert torch.equal(model(x), both)
        assert_close(torch.cat([model(x[:1]), model(x[1:])]), both)


def test_batch_norms_and_channels_last(model):
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == published.CONVOLUTIONS.count("inception") + 3
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}
    x = images(32)
    with torch.no_grad():
        expected = model(x)
        other = copy.deepcopy(model)
        found = other.to(memory_format=torch.channels_last)(
            x.contiguous(memory_format=torch.channels_last)
        )
    assert_close(found, expected)
