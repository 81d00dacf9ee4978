"""BN-Inception equals the published network."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from benchmarks.backbones.inception import BNInception, checkpoint_filter_fn
from tests.references import bn_inception as published
from tests.support.tolerances import assert_close

PARAMETERS = 11_295_240


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Random weights in the published layout."""
    torch.manual_seed(0)
    return published.random_weights()


def empty() -> BNInception:
    """Shapes without numbers, which takes no time."""
    with torch.device("meta"):
        return timm.create_model("bn_inception").eval()


@pytest.fixture(scope="module")
def model(weights: dict[str, Tensor]) -> BNInception:
    """Model with these weights, in float64 and evaluation mode; do not change it."""
    model = empty()
    model.load_state_dict(checkpoint_filter_fn(weights, model), assign=True)
    return model


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


@pytest.mark.parametrize("size", [(64, 64), (35, 67)], ids=str)
def test_features_and_logits_equal_the_published_network(weights, model, size):
    pixels = np.random.default_rng(0).integers(0, 256, (2, *size, 3), dtype=np.uint8)
    batch = [Image.fromarray(picture) for picture in pixels]
    ours, theirs = as_timm(model, batch), as_published(batch)
    # timm normalises in float32: that is all that the two inputs differ by.
    torch.testing.assert_close(ours, theirs.flip(1), rtol=0, atol=1e-4)
    ours = theirs.flip(1)
    with torch.no_grad():
        expected = published.features(weights, theirs)
        assert_close(model.forward_features(ours), expected)
        assert_close(model(ours), published.logits(weights, theirs))
    assert expected.std() > 0.1 * expected.mean()


def test_the_published_layout_has_variants_and_others_are_left_for_the_loader(weights, model):
    own = model.state_dict()
    variant = {
        name.replace("last_linear", "fc"): value.squeeze(0) if "_bn." in name else value
        for name, value in weights.items()
    }
    odd = {"conv1_7x7_s2_scale.weight", "inception_9z_1x1.weight", "odd"}
    converted = checkpoint_filter_fn(variant | dict.fromkeys(odd, torch.ones(1)), model)
    assert converted.keys() - own.keys() == odd
    assert all(torch.equal(converted[name], own[name]) for name in converted.keys() - odd)
    passed = checkpoint_filter_fn(own, model)
    assert all(passed[name] is value for name, value in own.items())


def test_parameters_and_batch_norms_are_the_published_ones(weights):
    assert sum(parameter.numel() for parameter in empty().parameters()) == PARAMETERS
    trained = [value for name, value in weights.items() if "running" not in name]
    assert sum(value.numel() for value in trained) == PARAMETERS
    norms = [module for module in empty().modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == published.CONVOLUTIONS.count("inception") + 3
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}
