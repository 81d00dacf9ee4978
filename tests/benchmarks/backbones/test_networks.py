"""Both networks are timm models: what timm's arguments do to them."""

import pytest
import timm
import torch

from benchmarks.backbones import register
from tests.references import bn_inception, googlenet
from tests.support.tolerances import assert_close

BOTH = pytest.mark.parametrize("name", ["googlenet", "bn_inception"])


def create(name, **kwargs):
    register()
    return timm.create_model(name, **kwargs).eval()


def shaped(name, **kwargs):
    """A model that has shapes but no numbers, which is made in no time."""
    with torch.device("meta"):
        return create(name, **kwargs)


@BOTH
def test_shapes_follow_timms_arguments(name):
    image = torch.empty(2, 3, 64, 64, device="meta")
    model = shaped(name, num_classes=7)
    assert model(image).shape == (2, 7)
    assert model.get_classifier().out_features == 7
    features = model.forward_features(image)
    assert features.shape == (2, 1024, 2, 2)
    assert model.forward_head(features).shape == (2, 7)
    assert model.num_features == 1024
    assert shaped(name, num_classes=0, global_pool="")(image).shape == (2, 1024, 2, 2)
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
def test_dropout_is_for_the_classifier_alone(name):
    model = create(name, drop_rate=0.9, num_classes=4).train()
    features = torch.randn(1, 1024, 2, 2)
    assert not torch.equal(model.forward_head(features), model.forward_head(features))
    pooled = create(name, drop_rate=0.9, num_classes=0).train().forward_head(features)
    assert torch.equal(pooled, features.mean(dim=(2, 3)))
    assert shaped(name).head.drop.p == {"googlenet": 0.4, "bn_inception": 0}[name]


PUBLISHED = {
    "googlenet": lambda: {
        f"{layer}.{blob}": value
        for layer, blobs in googlenet.random_weights().items()
        for blob, value in zip(("weight", "bias"), blobs, strict=True)
    },
    "bn_inception": lambda: bn_inception.random_weights(torch.float32),
}


@BOTH
def test_timm_loads_the_published_layout(name, tmp_path):
    path = tmp_path / "file.pth"
    torch.save(PUBLISHED[name](), path)
    overlay = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}
    whole = create(name, **overlay).state_dict()
    gray = create(name, **overlay, num_classes=5, in_chans=1)
    assert gray.get_classifier().out_features == 5
    first = f"{gray.pretrained_cfg['first_conv']}.weight"
    for key, value in gray.state_dict().items():
        if key == first:
            assert_close(value, whole[key].sum(dim=1, keepdim=True))
        elif not key.startswith("head."):
            assert torch.equal(value, whole[key]), key
    with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
        create(name, pretrained=True)
