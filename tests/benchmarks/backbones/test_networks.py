"""GoogLeNet and BN-Inception equal the published networks, and are models of timm."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from benchmarks.backbones import register
from benchmarks.backbones.inception import ResponseNorm, checkpoint_filter_fn
from tests.references import inception as published
from tests.support.tolerances import assert_close

NAMES = ("googlenet", "bn_inception")
BOTH = pytest.mark.parametrize("name", NAMES)


def create(name, **kwargs):
    register()
    return timm.create_model(name, **kwargs).eval()


def shaped(name, **kwargs):
    """A model that has shapes but no numbers, which is made in no time."""
    with torch.device("meta"):
        return create(name, **kwargs)


@pytest.fixture(scope="module")
def weights():
    """Random weights in the published layouts."""
    torch.manual_seed(0)
    return {name: published.random_weights(name) for name in NAMES}


@pytest.fixture(scope="module")
def models(weights):
    """Models with these weights, in float64 and evaluation mode; do not change them."""
    models = {name: shaped(name) for name in NAMES}
    for name, model in models.items():
        model.load_state_dict(checkpoint_filter_fn(weights[name], model), assign=True)
    return models


def as_published(name, picture):
    """(1, BGR, H, W), 0..255 less the mean."""
    bgr = torch.from_numpy(np.array(picture)[..., ::-1].astype(np.float64))
    return (bgr - torch.tensor(published.MEAN_BGR[name])).permute(2, 0, 1)[None]


def noise(width, height):
    pixels = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(64, 64), (67, 35)], ids=str)
@BOTH
def test_features_and_logits_equal_the_published_network(name, size, weights, models):
    bgr = as_published(name, noise(*size))
    with torch.no_grad():
        expected = published.features(name, weights[name], bgr)
        assert_close(models[name].forward_features(bgr.flip(1)), expected)
        assert_close(models[name](bgr.flip(1)), published.logits(name, weights[name], bgr))
    assert expected.std() > 0.1 * expected.mean()


def test_googlenet_sees_the_whole_image_squeezed_into_a_square(models):
    picture = noise(300, 200)
    view = create_transform(**resolve_model_data_config(models["googlenet"]))(picture)
    square = picture.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
    same = as_published("googlenet", square)[0].flip(0)
    torch.testing.assert_close(view.double(), same, rtol=0, atol=1e-4)


def test_response_norm_squares_in_float32():
    x = (torch.randn(2, 7, 3, 4) * 1000).half()
    found = ResponseNorm(5)(x)
    assert found.dtype == torch.float16
    assert_close(found, published.response_norm(x.double()).half())


def test_the_published_layouts_have_variants_and_others_are_left_for_the_loader(weights, models):
    own = models["bn_inception"].state_dict()
    variant = {
        name.replace("last_linear", "fc"): value.squeeze(0) if "_bn." in name else value
        for name, value in weights["bn_inception"].items()
    }
    odd = {"conv1_7x7_s2_scale.weight", "inception_9z_1x1.weight", "odd"}
    variant |= dict.fromkeys(odd, torch.ones(1))
    converted = checkpoint_filter_fn(variant, models["bn_inception"])
    assert converted.keys() - own.keys() == odd
    assert all(torch.equal(converted[name], own[name]) for name in converted.keys() - odd)
    passed = checkpoint_filter_fn(own, models["bn_inception"])
    assert all(passed[name] is value for name, value in own.items())


@BOTH
def test_shapes_follow_timms_arguments(name):
    image = torch.empty(2, 3, 64, 64, device="meta")
    model = shaped(name, num_classes=7)
    assert model(image).shape == (2, 7)
    assert model.get_classifier().out_features == 7
    assert model.num_features == 1024
    assert model.head.drop.p == {"googlenet": 0.4, "bn_inception": 0}[name]
    assert shaped(name, num_classes=0, global_pool="")(image).shape == (2, 1024, 2, 2)
    headless = create(name, drop_rate=0.9, num_classes=0).train()
    assert (headless.forward_head(torch.ones(1, 1024, 2, 2)) == 1).all()  # without its dropout
    assert shaped(name, in_chans=5)(image[:, :1].expand(-1, 5, -1, -1)).shape == (2, 1000)


@BOTH
def test_feature_maps_are_those_of_the_whole_network(name):
    torch.manual_seed(1)
    whole = create(name)
    torch.manual_seed(1)
    model = create(name, features_only=True)
    assert model.feature_info.reduction() == [2, 4, 8, 16, 32]
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        maps = model(image)
        assert torch.equal(maps[-1], whole.forward_features(image))
    for features, info in zip(maps, whole.feature_info, strict=True):
        assert features.shape[1:] == (info["num_chs"], *[64 // info["reduction"]] * 2)
        assert isinstance(whole.get_submodule(info["module"]), torch.nn.Module)


@BOTH
def test_timm_loads_the_published_layout(name, weights, models, tmp_path):
    path = tmp_path / "file.pth"
    torch.save({key: value.float() for key, value in weights[name].items()}, path)
    overlay = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}
    gray = create(name, **overlay, num_classes=5, in_chans=1)
    first = f"{gray.pretrained_cfg['first_conv']}.weight"
    whole = models[name].state_dict()
    for key, value in gray.state_dict().items():
        if key == first:
            assert_close(value, whole[key].float().sum(dim=1, keepdim=True))
        elif not key.startswith("head."):
            assert torch.equal(value, whole[key].to(value.dtype)), key
    with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
        create(name, pretrained=True)
