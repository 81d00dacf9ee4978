"""What photographs of one's own bring along: an orientation, and many pixels."""

import dataclasses
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from benchmarks.datasets import ImageSet, folder
from benchmarks.datasets.images import read_image
from benchmarks.datasets.listing import DatasetError, Listing
from benchmarks.datasets.verify import Check, verify
from tests.benchmarks.datasets.test_images import HEIGHT, SIXTEEN, VIEWS, WIDTH, pixels_of
from tests.support.processes import ROOT, TIMEOUT, environment

PIXELS = pixels_of(3)


def turned_by(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("image", [PIXELS, SIXTEEN], ids=["colour", "16 bits"])
def test_a_rotated_image_is_turned_if_asked_for(tmp_path, orientation, image):
    path = tmp_path / "1.png"
    Image.fromarray(image).save(path, exif=turned_by(orientation))
    stored = read_image(path)
    assert stored.size == (WIDTH, HEIGHT)
    expected = ImageOps.exif_transpose(stored)
    assert np.array_equal(read_image(path, upright=True), expected)
    assert np.array_equal(stored, expected) == (orientation not in range(2, 9))


def test_other_damaged_exif_does_not_matter(tmp_path):
    exif, path = turned_by(6), tmp_path / "1.jpg"
    exif[0x010F] = "Maker"
    Image.fromarray(PIXELS).save(path, exif=exif)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"\x01\x0f", b"\x01\x00"))  # a width that is a text
    with Image.open(path) as file, pytest.raises(struct.error):
        ImageOps.exif_transpose(file)
    assert read_image(path, upright=True).size == (HEIGHT, WIDTH)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_turns_nothing(tmp_path):
    path = tmp_path / "1.jpg"
    Image.fromarray(PIXELS).save(path, exif=turned_by(6))
    path.write_bytes(path.read_bytes().replace(b"MM\0*", b"MM\0?"))
    assert read_image(path, upright=True).size == (WIDTH, HEIGHT)


def test_only_a_folder_of_ones_own_is_shown_upright(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(PIXELS).save(tmp_path / name / "1.png", exif=turned_by(6))
    own = folder.read(tmp_path, 0.5)
    stored = Listing("cub", tmp_path, "flat", own.paths, own.classes, own.parts)
    shown = [ImageSet(listing, views=VIEWS)[0][0] for listing in (own, stored)]
    turned = np.asarray(Image.fromarray(PIXELS).rotate(-90, expand=True))
    for view, pixels in zip(shown, (turned, PIXELS), strict=True):
        assert np.array_equal(VIEWS.to_picture(view), pixels)


@pytest.mark.parametrize("fast", [False, True])
def test_rotated_files_are_counted(tmp_path, fast):
    for number in range(8):
        Image.fromarray(PIXELS).save(tmp_path / f"{number}.jpg", exif=turned_by(number))
    paths = [f"{number}.jpg" for number in range(8)]
    listing = Listing("toy", tmp_path, "flat", paths, paths, ["train"] * 8)
    for upright, said in ((False, "read as stored"), (True, "shown upright")):
        checks, _ = verify(dataclasses.replace(listing, upright=upright), num_workers=1, fast=fast)
        assert Check("rotated", None, f"6 images by their EXIF orientation, {said}") in checks


def test_an_intact_image_of_too_many_pixels_is_not_called_damaged(tmp_path, monkeypatch):
    path = tmp_path / "1.png"
    Image.fromarray(PIXELS).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDTH * HEIGHT / 2 - 1)
    with pytest.raises(
        DatasetError, match=r"\(120 pixels\) exceeds limit of 118.* pixels"
    ) as error:
        read_image(path)
    (problem,) = verify(Listing("one", tmp_path, "flat", [path.name], ["a"], ["train"]))[1]
    for text in (str(error.value), problem):
        assert text.endswith("; the file is not known to be damaged: shrink the image")


def test_a_large_image_is_read_without_a_warning(tmp_path):
    path = tmp_path / "1.png"
    Image.fromarray(PIXELS).save(path)
    code = f"""
import sys
from pathlib import Path
from PIL import Image
Image.MAX_IMAGE_PIXELS = {WIDTH * HEIGHT - 1}
from benchmarks.datasets.images import read_image
print(read_image(Path(sys.argv[1])).size)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code, path],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"({WIDTH}, {HEIGHT})\n", "")
