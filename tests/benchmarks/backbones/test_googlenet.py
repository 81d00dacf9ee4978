"""GoogLeNet equals Caffe's layers, and reads Caffe's files."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from benchmarks.backbones.inception import ResponseNorm, checkpoint_filter_fn
from benchmarks.backbones.weights import load_weights
from tests.benchmarks.backbones.test_caffe import caffemodel
from tests.references import googlenet as reference
from tests.support.tolerances import assert_close

PIXELS_TO_FEATURES = 1e-5  # float32 against float64, 22 layers deep, relative to the largest

AUXILIARY = {
    f"loss{number}/{layer}": [torch.zeros(2, 3), torch.zeros(2)]
    for number in (1, 2)
    for layer in ("conv", "fc", "classifier")
}


@pytest.fixture(scope="module")
def weights():
    """Caffe's layers and their blobs."""
    torch.manual_seed(0)
    return reference.random_weights()


def as_state_dict(weights):
    return {
        f"{layer}.{name}": blob
        for layer, blobs in weights.items()
        for name, blob in zip(("weight", "bias"), blobs, strict=True)
    }


def create(**kwargs):
    return timm.create_model("googlenet", **kwargs).eval()


def load(weights, **kwargs):
    model = create(**kwargs)
    model.load_state_dict(checkpoint_filter_fn(as_state_dict(weights), model))
    return model


@pytest.fixture(scope="module")
def model(weights):
    return load(weights)


def picture(width, height):
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


def as_caffe(pixels):
    """(H, W, RGB) of 0 to 255 -> (1, BGR, H, W) less the means of the prototxt."""
    bgr = torch.from_numpy(pixels[:, :, ::-1].astype(np.float64))
    return (bgr - torch.tensor([104.0, 117.0, 123.0])).permute(2, 0, 1)[None]


# ------------------------------------------------------------------------------ the papers' network


def test_parameters_are_those_of_the_layer_table(model):
    shapes = reference.shapes()
    assert len(shapes) == 3 + 9 * 6 + 1
    by_hand = sum(torch.Size(shape).numel() + shape[0] for shape in shapes.values())
    assert by_hand == 6_998_552
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand


def test_logits_equal_caffes_from_the_pixels_on(model, weights):
    """The whole image is squeezed into a square."""
    picture_file = Image.fromarray(picture(300, 200))
    image = create_transform(**resolve_model_data_config(model))(picture_file)[None]
    square = np.asarray(picture_file.resize((256, 256), Image.Resampling.BILINEAR))
    same = as_caffe(square[16:240, 16:240])
    assert_close(image[0], same[0].flip(0))
    with torch.no_grad():
        found, expected = model(image), reference.logits(same, weights)
    assert expected.shape == (1, 1000)
    assert (found - expected).abs().max() < PIXELS_TO_FEATURES * expected.abs().max()


def test_features_equal_caffes_to_rounding_at_an_odd_size(weights):
    model = load(weights, global_pool="").double()
    bgr = as_caffe(picture(101, 75))
    with torch.no_grad():
        found = model.forward_features(bgr.flip(1))
        expected = reference.features(bgr, weights)
    assert expected.shape == (1, 1024, 2, 3)
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_response_norm_equals_the_loop_and_squares_in_float32(dtype):
    x = (torch.randn(2, 7, 3, 4) * 1000).to(dtype)
    found = ResponseNorm(5)(x)
    assert found.dtype == dtype
    assert_close(found, reference.response_norm(x.double()).to(dtype))
    assert (found / x).min() < 0.5  # it does something


def test_initial_weights_are_the_prototxts():
    torch.manual_seed(0)
    for name, parameter in create().named_parameters():
        if name.endswith("weight"):
            bound = (3 / parameter[0].numel()) ** 0.5
            assert 0.98 * bound < parameter.abs().max() <= bound
        else:
            assert (parameter == (0 if name == "head.fc.bias" else 0.2)).all()


# ------------------------------------------------------------------------------------ Caffe's files


def test_colours_are_turned_once_and_what_is_not_known_is_left_for_the_loader(model, weights):
    own = model.state_dict()
    assert torch.equal(own["stem.conv1.weight"], weights["conv1/7x7_s2"][0].flip(1))
    again = checkpoint_filter_fn(own, model)
    assert all(again[key] is own[key] for key in own)
    other = {"conv9/7x7.weight": torch.zeros(1), "conv1/7x7_s2.weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"conv9/7x7\.weight.*\n.*stem\.conv1\.weight"):
        model.load_state_dict(checkpoint_filter_fn(as_state_dict(weights) | other, model))


def test_caffes_files_give_the_same_model(model, weights, tmp_path):
    arrays = {layer: [b.numpy() for b in blobs] for layer, blobs in (weights | AUXILIARY).items()}
    (tmp_path / "old.caffemodel").write_bytes(caffemodel(arrays, legacy=True))
    (tmp_path / "new.caffemodel").write_bytes(caffemodel(arrays))
    expected = model.state_dict()
    for path in sorted(tmp_path.iterdir()):
        other = create()
        load_weights(other, path)
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, expected[name]), (path.name, name)
