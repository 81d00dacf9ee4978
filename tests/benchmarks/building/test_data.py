"""Training and test images of an experiment, and whole runs on photographs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from benchmarks.building import images
from benchmarks.building.images import build_datasets, image_size, image_views, show_to
from benchmarks.run import main
from benchmarks.settings.data import Data, num_workers
from benchmarks.settings.errors import ConfigError
from tests.support.fake_trees import inshop

CAFFE = {
    "input_size": (3, 24, 24),
    "mean": (123 / 255, 117 / 255, 104 / 255),
    "std": (1 / 255,) * 3,
    "interpolation": "bilinear",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


class Trunk(nn.Module):
    """The part of a timm model that describes its images."""

    pretrained_cfg = CAFFE


def small(root: Path, **settings: object) -> Data:
    return Data(root=root, image_size=24, **settings)


def photographs(root: Path, classes: str, count: int = 2) -> Path:
    """A folder of one's own: so many JPEGs in a folder for each letter."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (40, 30), "red").save(root / name / f"{i}.jpg")
    return root


def test_a_trunk_says_how_images_are_normalised_and_how_large(tmp_path: Path) -> None:
    """Caffe's statistics: what comes out is 0..255 less the mean, red first."""
    data = Data(dataset="folder", root=photographs(tmp_path, "abcd"))
    assert image_size(data, Trunk()) == 24
    train, *_ = show_to(Trunk(), build_datasets(data), data)
    view, _, _ = train[0]
    assert view.shape == (3, 24, 24)
    bytes_ = view + torch.tensor([123.0, 117.0, 104.0]).view(3, 1, 1)
    torch.testing.assert_close(bytes_, bytes_.round(), rtol=0, atol=1e-4)
    assert bytes_[0].min() > 250 and bytes_[1:].abs().max() < 5
    assert image_size(Data(), Trunk()) == 32


def test_settings_reach_the_images(tmp_path: Path) -> None:
    given = {"resize": 30, "keep_aspect": False, "augmentation": "none", "interpolation": "bicubic"}
    root = photographs(tmp_path, "abcdefghijklmnopqrst")
    data = small(root, dataset="folder", train_classes=7, max_classes=9, **given)
    train, test, _ = show_to(Trunk(), build_datasets(data), data)
    assert {name: getattr(train.views, name) for name in given} == given
    assert (train.num_classes, test.num_classes) == (7, 9)
    assert torch.equal(train[0][0], train[0, 5][0])  # no augmentation


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    photographs(tmp_path, "abcdefgh")
    listed = tmp_path.parent / "listed.txt"
    listed.write_text("b\nd\n")
    for chosen, classes in ((None, 4), (0.25, 2), (listed, 2)):
        data = small(tmp_path, dataset="folder", test_classes=chosen)
        train, test, _ = show_to(Trunk(), build_datasets(data), data)
        assert (test.view["image_size"], test.view["keep_aspect"]) == (24, True)
        assert (train.num_classes, test.num_classes) == (8 - classes, classes)
    assert test.class_names == ["b", "d"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "cub"}, "data.root: .*/empty"),
        ({"dataset": "folder", "test_classes": Path("none.txt")}, "data.test_classes: none.txt"),
        ({"dataset": "folder", "test_classes": 0.5}, "no test class has two images"),
        ({"dataset": "folder", "test_classes": Path("b")}, "images to test on are of one class"),
        ({"dataset": "folder", "test_classes": Path("bcd")}, "images to train on are of one class"),
    ],
)
def test_what_is_missing_is_one_sentence(
    tmp_path: Path, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    monkeypatch.chdir(tmp_path)
    for listed in ("b", "bcd"):
        Path(listed).write_text("\n".join(listed))
    if "test_classes" in settings:
        photographs(root, "abcd", count=1)
    with pytest.raises(ConfigError, match=message) as caught:
        build_datasets(small(root, **settings))
    assert "\n" not in str(caught.value)


def test_the_seed_draws_training_classes_and_no_others(tmp_path: Path) -> None:
    root = photographs(tmp_path, "abcdefghijklmnopqrstuvwxyz")
    data = small(root, dataset="folder", train_classes=5)
    for how in ({}, {"split": "validation", "fold": 1}, {"max_classes": 4}):
        settings = replace(data, **how)
        first, *rest = build_datasets(settings, seed=3)
        one, two, again = (
            build_datasets(replace(settings, draw_classes=True), seed=seed) for seed in (3, 4, 3)
        )
        assert one.train.class_names == again.train.class_names
        assert len({*map(tuple, (x.class_names for x in (first, one.train, two.train)))}) == 3
        assert one.train.num_classes == two.train.num_classes == how.get("max_classes", 5)
        for drawn in (one, two):
            assert drawn.test.class_names == rest[0].class_names
            assert not {*drawn.train.class_names} & {*drawn.test.class_names}
    fair = replace(data, draw_classes=True)
    kept = [build_datasets(fair, seed=seed, fair=True).validation for seed in (3, 4)]
    assert kept[0].class_names == kept[1].class_names


def test_sizes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    root = photographs(tmp_path, "abcd")
    with pytest.raises(ConfigError, match=r"data\.resize: expected at least image_size \(24\)"):
        image_views(small(root, dataset="folder", resize=20), Trunk())
    with pytest.raises(ConfigError, match=r"data\.folds: expected 2 .* got 101"):
        build_datasets(small(root, dataset="folder", split="validation", folds=101))


def test_processors_are_shared_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: 12)
    photographs = Data(dataset="cub")
    assert [num_workers(photographs, processes) for processes in (1, 2, 4)] == [8, 6, 3]
    assert num_workers(Data(), 1) == 0
    assert num_workers(Data(dataset="cub", num_workers=5), 3) == 5


# --------------------------------------------------------------------------------------- whole runs

SETTINGS = [
    "--recipe=images/resnet50/binomial",
    "--model.trunk=test_convnext",
    "--model.trunk_args={}",
    "--model.embedding_size=8",
    "--data.image_size=32",
    "--data.batch_size=8",
    "--data.samples_per_class=2",
    "--data.max_classes=6",
    "--optimization.steps=2",
    "--evaluation.every=0",
]


def test_a_run_against_a_gallery_from_a_file_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = inshop.write(tmp_path / "data", inshop.few_photos(12, 9))
    counts = {"train": (36, 12), "query": (18, 9), "gallery": (9, 9)}
    info = images.IMAGE_DATASETS["inshop"]
    monkeypatch.setitem(images.IMAGE_DATASETS, "inshop", replace(info, counts=counts))
    weights = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_convnext", num_classes=3).state_dict(), weights)
    output = tmp_path / "run"
    arguments = ["--data.dataset=inshop", f"--data.root={root}", f"--model.weights={weights}"]
    arguments += ["--data.max_classes=9", "--data.num_workers=0"]
    assert main([*SETTINGS, *arguments, f"--output={output}"]) == 0
    record = json.loads((output / "run.json").read_text())
    assert record["data"]["layout"] == "img"
    assert record["data"]["test_images"] == 27
    assert record["weights"]["file"] == "weights.pth"
    assert len(record["weights"]["sha256"]) == 64
    with np.load(output / "retrieval.npz") as shown:
        assert all("front" in name for name in shown["query_names"])


def test_a_few_photographs_are_enough(tmp_path: Path) -> None:
    """Fewer to test on than the report shows neighbours."""
    photographs(tmp_path / "data", "abcdefgh")
    listed = tmp_path / "listed.txt"
    listed.write_text("a\nb\n")
    arguments = [f"--data.root={tmp_path / 'data'}", f"--data.test_classes={listed}"]
    arguments += ["--data.num_workers=1", f"--output={tmp_path / 'run'}"]
    assert main([*SETTINGS, *arguments]) == 0
    with np.load(tmp_path / "run" / "retrieval.npz") as shown:
        assert shown["neighbour_images"].shape == (8, 3, 32, 32, 3)
    assert "data:image/png" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded_stops_the_run_with_its_path(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for broken in photographs(tmp_path / "data", "abcdefgh").glob("*/1.jpg"):
        content = broken.read_bytes()
        broken.write_bytes(content[: len(content) // 2])
    arguments = [f"--data.root={tmp_path / 'data'}", f"--data.num_workers={workers}"]
    arguments += [f"--output={tmp_path / 'run'}"]
    assert main([*SETTINGS, *arguments]) == 2
    error = capsys.readouterr().err
    [line] = [line for line in error.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: data.root: {tmp_path / 'data'}/")
    assert "1.jpg: cannot be read" in line
    assert "benchmarks.datasets verify" in line
    assert not (tmp_path / "run" / "run.json").exists()
