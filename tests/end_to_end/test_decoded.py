"""Runs that decode their photographs once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.building.images import build_datasets
from benchmarks.datasets.decoded import DecodedImages
from benchmarks.datasets.transforms import ImageViews
from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.run import main
from benchmarks.settings.command import parse
from tests.benchmarks.runs import finished

SIZES = {"owl": (40, 30), "emu": (30, 44), "jay": (36, 36), "auk": (50, 33), "ibis": (31, 64)}


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A run of some steps on photographs of several sizes."""
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        (tmp_path / "birds" / name).mkdir(parents=True)
        for i in range(5):
            picture = Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8))
            picture.resize(size).save(tmp_path / "birds" / name / f"{i}.jpg")
    return [
        *(f"--data.root={tmp_path / 'birds'}", "--data.dataset=folder", "--data.image_size=32"),
        *("--data.batch_size=4", "--data.samples_per_class=2", "--data.num_workers=0"),
        *("--optimization.steps=4", "--evaluation.every=2", "--evaluation.recall_at=[1]"),
    ]


def test_a_run_ends_with_the_same_bits(settings, tmp_path):
    ends = []
    for name, more in {"read": [], "decoded": ["--data.decoded_gib=1"]}.items():
        record = finished([*settings, *more], tmp_path / name)
        checkpoint = torch.load(saved_checkpoints(tmp_path / name)[-1])
        ends.append((record["metrics"], checkpoint["model"]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_too_little_room(settings, tmp_path, refused):
    pixels = sum(5 * width * height for width, height in SIZES.values())
    gib = f"{0.9 * 3 * pixels / 2**30:.3g}"
    line = refused(main, *settings, f"--data.decoded_gib={gib}", f"--output={tmp_path / 'run'}")
    assert f"GiB are needed, {gib} are allowed" in line


def test_views_made_in_batches(settings):
    """As on a GPU: the views of one image are those that Pillow makes, up to its rounding."""
    data = parse([*settings, "--data.decoded_gib=1"]).experiment.data
    images = build_datasets(data).train
    images.views = ImageViews(image_size=32, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    decoded = DecodedImages(images, torch.device("cpu")).open()
    decoded.device = torch.device("meta")  # any but the CPU
    keys = [(0, 7), 3, (3, 1), 9, (3, 2)]
    for found, key in zip(decoded.__getitems__(keys), keys, strict=True):
        view, label, index = images[key]
        assert found[1:] == (label, index)
        assert (found[0] - view).abs().max() < 4
    [(batch, labels, _)] = DataLoader(decoded, batch_sampler=[keys])
    assert batch.shape == (5, 3, 32, 32)
    assert labels.tolist() == [images.labels[i] for i in (0, 3, 3, 9, 3)]
