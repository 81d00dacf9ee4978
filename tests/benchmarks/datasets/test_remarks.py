"""What a folder holds that is allowed and often a mistake is told: recurring names, parts, copies, other files."""

import hashlib
import shutil
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.datasets import folder, table
from benchmarks.datasets.contents import listed_digests
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.remarks import remarks
from benchmarks.datasets.transforms import ImageViews

VIEWS = ImageViews(image_size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def write(root: Path, *paths: str) -> Path:
    """Images of different pixels; those with the same word after "=" are equal."""
    for path in paths:
        name, _, content = path.partition("=")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        colour = tuple(hashlib.sha256((content or name).encode()).digest()[:3])
        Image.new("RGB", (9, 6), colour).save(root / name)
    return root


def told(root: Path, test: str | None = None, level: folder.Level | None = None) -> dict[str, str]:
    chosen: Path | float = 0.5
    if test is not None:
        chosen = root.parent / "test.txt"
        chosen.write_text(test)
    listing = folder.read(root, chosen, level)
    return dict(remarks(listing, listed_digests(listing)))


def test_parts_that_are_taken_for_classes_are_told(tmp_path: Path) -> None:
    paths = [f"{part}/{name}/{i}.png" for part in ("Train", "val") for name in "abcd" for i in "12"]
    root = write(tmp_path / "r", *paths)
    lines = told(root)
    assert lines["parts"].startswith("Train, val: looks like a part")
    assert lines["same names"].startswith("4 recur, such as Train/a and val/a, ")
    listing = folder.read(root, 0.5, "last")
    assert sorted(set(listing.classes)) == [*"abcd"]
    assert len(listing.paths) == 16 and told(root, level="last") == {}
    assert told(root, level=1)["parts"].startswith("Train, val: looks like a part")
    write(root, "x/Train/1.png", "x/A/1.png", "test/1.png")
    lines = told(root, level="last")
    assert lines["parts"].startswith("Train, test: ") and "same names" in lines
    assert not [text for text in lines.values() if "class_level" in text], "it is set"


@pytest.mark.parametrize(
    ("first_name", "second_name"),
    [("x/Apple", "y/apple"), ("ﬁr", "FIR"), ("Apple", "Apple "), ("red apple", "Red_Apple")],
)
def test_names_that_recur_are_told(first_name: str, second_name: str, tmp_path: Path) -> None:
    root = write(tmp_path / "r", f"{first_name}/1.png", f"{second_name}/2.png", "third/3.png")
    assert told(root)["same names"].startswith("1 recur, such as ")


def test_copies_are_counted(tmp_path: Path) -> None:
    """Also one in another format, which is to be turned by its EXIF orientation."""
    root = write(
        tmp_path / "r",
        *("a/1.png", "a/3.png", "b/1.png=y", "b/2.png=z", "c/1.png=y", "c/2.png=w", "c/3.png=w"),
        *("d/1.png=z", "d/2.png"),
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(root / "a/1.png") as image:
        image.transpose(Image.Transpose.ROTATE_90).save(root / "a/2.tif", exif=exif)
    lines = told(root, "a\nb\n")
    assert lines["copies"].startswith("2 images of part train have a copy in it, such as c/2.png")
    assert lines["train and test"].startswith("2 images train and test, such as b/1.png = c/1.png")
    assert lines["two classes"].startswith("2 images are in two classes, such as b/1.png = c/1.png")
    listing = folder.read(root, tmp_path / "test.txt")
    lines = [text for name, text in remarks(listing, listed_digests(listing)) if name == "copies"]
    assert lines[0].startswith("2 images of part test have a copy in it, such as a/1.png")
    assert ImageSet(listing, "test", views=VIEWS).copies() == 2
    assert ImageSet(listing, "train", views=VIEWS).copies() == 2


def test_copies_between_queries_and_gallery_are_counted(tmp_path: Path) -> None:
    """A link, a copy of the file and one of the pixels, each once."""
    root = write(tmp_path / "r", *(f"{i}.png" for i in "abcfg"), "d.png=y", "e.png=y")
    (root / "hard.png").hardlink_to(root / "a.png")
    (root / "soft.png").symlink_to(root / "b.png")
    shutil.copy(root / "c.png", root / "copy.png")
    queries = [f"{i}.png,{label},true" for i, label in zip("abcdf", "xxyyx", strict=True)]
    others = ("hard", "soft", "copy", "e", "g")
    gallery = [f"{i}.png,{label},false" for i, label in zip(others, "xxyyy", strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,query", *queries, *gallery]))
    listing = table.read(tmp_path / "t.csv", root, default=None)
    lines = dict(remarks(listing, listed_digests(listing)))
    assert list(lines) == ["copies"]
    line = "8 images of parts query and gallery have a copy in them, 4 of them queries with a copy in the gallery, "
    assert lines["copies"].startswith(line)


def test_files_that_are_no_images_are_counted(tmp_path: Path) -> None:
    root = write(tmp_path / "r", "a/1.png", "b/1.png")
    assert told(root) == {}, "an ordinary folder needs no word"
    for name in ("a/1.HEIC", "a/2.heic", "b/notes.txt", "b/.hidden"):
        (root / name).touch()
    assert told(root)["left out"].startswith("2 .heic, 1 .txt; convert")
