"""The `ImageFolder` of the notebooks holds the images that a run on a folder trains on."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

from benchmarks.datasets import DatasetError, ImageFolder, folder, read_image


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Classes of two depths and a linked one; 16 bits, a suffix that torchvision leaves out, hidden files."""
    place, other = tmp_path / "photographs", tmp_path / "elsewhere"
    for name in (place / "a", place / "b" / "deep", place / ".cache", other):
        name.mkdir(parents=True)
        Image.new("RGB", (8, 6), (len(name.name), 0, 0)).save(name / "1.png")
    Image.fromarray(np.full((6, 8), 30000, np.uint16)).save(place / "a" / "2.png")
    Image.new("RGB", (8, 6)).save(place / "b" / "deep" / "2.jfif", "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (8, 6)).save(place / "a" / "3.jpg", exif=exif)
    (place / "a" / "._1.png").touch()
    (place / "a" / "notes.txt").touch()
    (place / "c").symlink_to(other)
    return place


def test_images_are_those_of_a_run(root: Path) -> None:
    found = ImageFolder(root)
    listing = folder.read(root, 0.5)
    assert [path for path, _ in found.samples] == [f"{root / path}" for path in listing.paths]
    assert found.classes == ["a", "b/deep", "c"] and found.targets == [0, 0, 0, 1, 1, 2]
    assert [found.classes[label] for label in found.targets] == listing.classes
    for (path, label), (image, got) in zip(found.samples, found, strict=True):
        assert got == label
        np.testing.assert_array_equal(image, read_image(Path(path), upright=True))
    assert np.asarray(found[1][0]).max() == 117 and found[2][0].size == (6, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(
    root: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = root / "b" / "deep" / "1.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    view = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    with pytest.raises(DatasetError, match=rf"{damaged}: cannot be read"):
        list(DataLoader(ImageFolder(root, view), num_workers=workers))
    found = ImageFolder(root, view, leave_out_damaged=True)
    assert found.targets == [0, 0, 0, 1, 2] and len(list(DataLoader(found))) == 5
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"left out: {damaged}: cannot be read")
