"""Training and test images of an experiment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.building.images import build_datasets, image_size, image_views, show_to
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError


class Trunk(nn.Module):
    """The part of a timm model that describes its images, with Caffe's statistics."""

    pretrained_cfg = {
        "input_size": (3, 24, 24),
        "mean": (123 / 255, 117 / 255, 104 / 255),
        "std": (1 / 255,) * 3,
        "interpolation": "bilinear",
        "crop_pct": 0.875,
        "crop_mode": "center",
    }


def photographs(root: Path, classes: str, count: int = 2, **settings: Any) -> Data:
    """A folder of one's own: so many JPEGs in a folder for each letter."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (40, 30), "red").save(root / name / f"{i}.jpg")
    return Data(dataset="folder", root=root, **settings)


def test_a_trunk_says_how_images_are_normalised_and_how_large(tmp_path: Path) -> None:
    """What comes out is 0..255 less the mean, red first."""
    data = photographs(tmp_path, "abcd")
    assert image_size(data, Trunk()) == 24
    train, *_ = show_to(Trunk(), build_datasets(data), data)
    view, _, _ = train[0]
    assert view.shape == (3, 24, 24)
    assert train.view["keep_aspect"] is True
    bytes_ = view + torch.tensor([123.0, 117.0, 104.0]).view(3, 1, 1)
    torch.testing.assert_close(bytes_, bytes_.round(), rtol=0, atol=1e-4)
    assert bytes_[0].min() > 250 and bytes_[1:].abs().max() < 5
    assert image_size(Data(), Trunk()) == 32


def test_settings_reach_the_images(tmp_path: Path) -> None:
    given = {"resize": 30, "keep_aspect": False, "augmentation": "none", "interpolation": "bicubic"}
    data = photographs(tmp_path, "abcdefghijkl", train_classes=3, max_classes=5, **given)
    train, test, _ = show_to(Trunk(), build_datasets(data), data)
    assert {name: getattr(train.views, name) for name in given} == given
    assert (train.num_classes, test.num_classes) == (3, 5)
    assert torch.equal(train[0][0], train[0, 5][0])  # no augmentation
    listed = tmp_path.parent / "listed.txt"
    listed.write_text("b\nd\n")
    train, test, _ = build_datasets(Data(dataset="folder", root=tmp_path, test_classes=listed))
    assert (train.num_classes, test.class_names) == (10, ["b", "d"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "cub"}, "data.root: .*/photos: found no images.txt"),
        ({"test_classes": Path("none.txt")}, "data.test_classes: none.txt"),
        ({"test_classes": 0.5}, "no test class has two images"),
        ({"test_classes": Path("b")}, "4 classes"),
        ({"test_classes": Path("bcd")}, "images to train on are of one class"),
        ({"split": "validation", "folds": 101}, r"data\.folds: expected 2 .* got 101"),
    ],
)
def test_what_is_missing_is_one_sentence(tmp_path, settings, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for listed in ("b", "bcd"):
        Path(listed).write_text("\n".join(listed))
    data = photographs(tmp_path / "photos", "abcd", count=1)
    with pytest.raises(ConfigError, match=message) as caught:
        build_datasets(replace(data, **settings))
    assert "\n" not in str(caught.value)


def test_an_image_size_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.resize: expected at least .*24"):
        image_views(Data(dataset="folder", resize=20), Trunk())


def test_the_seed_draws_training_classes_and_no_others(tmp_path: Path) -> None:
    data = photographs(tmp_path, "abcdefghijklmnopqrstuvwxyz", train_classes=5)
    for how in ({}, {"split": "validation", "fold": 1}, {"max_classes": 4}):
        settings = replace(data, **how)
        drawn = replace(settings, draw_classes=True)
        found = [build_datasets(settings, seed=3)]
        found += [build_datasets(drawn, seed=seed) for seed in (3, 4, 3)]
        names = [tuple(of.train.class_names) for of in found]
        assert names[1] == names[3] and len({*names}) == 3
        assert [len(of) for of in names] == [how.get("max_classes", 5)] * 4
        [tested] = {tuple(of.test.class_names) for of in found}
        assert not {*tested} & {name for of in names for name in of}
    fair = replace(data, draw_classes=True)
    kept = [build_datasets(fair, seed=seed, fair=True).validation for seed in (3, 4)]
    assert kept[0].class_names == kept[1].class_names
