"""Damaged and hostile images, names and index files are read right, or one line says why not.

`pytest tests/end_to_end/attacks --attacks 1000` makes a thousand of each kind; Hypothesis shrinks what fails.
"""

import io
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unicodedata import category

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.datasets import IMAGE_DATASETS, DatasetError, ImageSet, folder
from benchmarks.datasets.images import FORMATS, read_image
from benchmarks.datasets.listing import Listing
from benchmarks.datasets.transforms import ImageViews
from benchmarks.datasets.verify import verify
from tests.support.fake_trees import cars, cub, inshop, sop

LONGEST = 1_000  # letters of a line


def is_shown(text: str) -> bool:
    """True if no character ends a line, moves a terminal's cursor or changes the writing direction."""
    return not any(category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text) and (
        "\u202e" not in text
    )


def is_one_line(error: Exception) -> bool:
    return is_shown(str(error)) and len(str(error)) < LONGEST


def damaged(draw: random.Random, whole: bytes) -> bytes:
    """Some bits flipped, bytes overwritten, cut out, doubled or cut off."""
    content = bytearray(whole)
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 4, 64, 4096]))
    match draw.choice(["flip", "flip", "flip", "noise", "zeros", "cut out", "double", "cut off"]):
        case "flip":
            for _ in range(draw.choice([1, 1, 2, 8, 64])):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case "noise":
            content[start:end] = draw.randbytes(end - start)
        case "zeros":
            content[start:end] = bytes(end - start)
        case "cut out":
            del content[start:end]
        case "double":
            content[start:start] = content[start:end]
        case "cut off":
            del content[start:]
    return bytes(content)


DRAW = st.randoms(use_true_random=False)


# ------------------------------------------------------------------------------------------ images


KINDS = (*FORMATS, *FORMATS, "EPS", "ICO", "PCX", "TGA", "PDF", "SGI", "DDS", "MPO")
PIXELS = np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8)


@pytest.mark.filterwarnings("ignore")
@given(draw=DRAW)
def test_images(tmp_path: Path, draw: random.Random) -> None:
    """Images of every format, also of those that are not to be opened."""
    kind, file = draw.choice(KINDS), io.BytesIO()
    frames = {"save_all": True, "append_images": [Image.new("L", (48, 40))]}
    several = kind in ("GIF", "TIFF", "WEBP") and draw.random() < 0.3
    mode = draw.choice(["L", "RGB"])
    Image.fromarray(PIXELS).convert(mode).save(file, kind, **(frames if several else {}))
    whole = file.getvalue()
    path = tmp_path / f"1.{draw.choice(['jpg', 'png', 'tif', kind.lower()])}"
    path.write_bytes(damaged(draw, whole) if draw.random() < 0.9 else whole)
    problems = verify(Listing("one", tmp_path, "flat", [path.name], ["a"], ["train"]))[1]
    try:
        assert read_image(path).mode == "RGB"
        assert problems == []
    except DatasetError as error:
        assert is_one_line(error)
        assert problems == [str(error)]
    path.unlink()


# ------------------------------------------------------------------------------------------- names

PIECES = (
    *("a", "Ω", "é", "e\u0301", "犬", "👩\u200d👧", " ", ".", "..", "-", "--data.root", "~"),
    *("\n", "\r", "\t", "\x1b[2J", "\x1b]0;x\x07", "\x7f", "\x9b", "\u202e", "\u2028"),
    *("\u202f", "\ufeff", "<script>", "&amp;", '"', "'", "\\", "%s", "{0}", "$(id)", "`id`"),
    *("CON", "C:", "|", "*", "x" * 200, "\udce9"),
)


@given(draw=DRAW)
def test_names(tmp_path: Path, draw: random.Random) -> None:
    """A name that cannot be shown is refused; each other one is found, and its image is read."""
    label, name = ("".join(draw.choices(PIECES, k=draw.randint(1, 3))) for _ in range(2))
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    try:
        for place in (root / "b" / "1.png", Path(f"{root}/{label}/{name}.png")):
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9)).save(place, "PNG")
    except OSError:
        return  # a name that this file system does not take
    try:
        listing = folder.read(root, 0.5)
    except DatasetError as error:
        assert is_one_line(error)
        return
    assert label.startswith(".") or name.startswith(".") or f"{label}/{name}.png" in listing.paths
    assert listing.fingerprint
    views = ImageViews(image_size=16, mean=(0, 0, 0), std=(1, 1, 1))
    for image, _, _ in (ImageSet(listing, part, views=views)[0] for part in ("train", "test")):  # type: ignore[arg-type]
        assert image.shape == (3, 16, 16)
    checks, broken = verify(listing)
    assert not broken
    assert all(is_shown(check.detail) for check in checks)


# ------------------------------------------------------------------------------------- index files

TREES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "cub": ("cub", cub.write),
    "sop": ("sop", sop.write),
    "inshop": ("inshop", inshop.write),
    **{layout: ("cars", partial(cars.write, layout=layout)) for layout in cars.LAYOUTS},
}
WORDS = (
    *("..", "../..", "/etc", "/etc/passwd", ".", "~", "\\", "a\\b", "C:\\x", "//x", "-", "*"),
    *("images/../../..", "0", "-1", "1.5", "nan", "inf", "1e400", "9" * 30, "9" * 5_000, "0x10"),
    *("١", "", " ", ",", ",,", "\t", "\0", "\x1b[2J", "\x85", "\u2028", "\u202e", "\ufeff"),
    *("'", '"', "<b>", "x" * 2_000, "train", "query"),
)


def hostile(draw: random.Random, text: str) -> str:
    """One word or part of it replaced, or a line left out, doubled or moved."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    match draw.choice(["word", "word", "word", "part", "everywhere", "drop", "double", "swap"]):
        case "word":
            for mark in ",", "/", " ":
                parts = lines[at].split(mark)
                if draw.random() < 0.5:
                    parts[draw.randrange(len(parts))] = draw.choice(WORDS)
                    lines[at] = mark.join(parts)
        case "part":
            place = draw.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + draw.choice(WORDS) + lines[at][place + 1 :]
        case "everywhere":
            old = draw.choice(lines[at].replace(",", " ").replace("/", " ").split() or ["x"])
            return text.replace(old, draw.choice(WORDS))
        case "drop":
            del lines[at]
        case "double":
            lines.insert(draw.randrange(len(lines)), lines[at])
        case "swap":
            other = draw.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trees")
    for name, (_, write) in TREES.items():
        write(place / name)
    return place


@pytest.mark.filterwarnings("ignore")
@given(draw=DRAW)
def test_index_files(trees: Path, draw: random.Random) -> None:
    """No listed image lies outside of the folder; what is wrong is a line."""
    name = draw.choice(list(TREES))
    files = sorted((trees / name).rglob("*"))
    path = draw.choice([file for file in files if file.suffix in (".txt", ".csv", ".mat")])
    whole = path.read_bytes()
    if path.suffix == ".mat" or draw.random() < 0.3:
        path.write_bytes(damaged(draw, whole))
    else:
        path.write_bytes(hostile(draw, whole.decode()).encode("utf-8", "surrogateescape"))
    try:
        listing = IMAGE_DATASETS[TREES[name][0]].read(trees / name)
        root = listing.root.resolve()
        for listed in listing.paths:
            assert (root / listed).resolve().is_relative_to(root), (path, listed)
            assert ".." not in listed.split("/")
        assert all(map(is_shown, {*listing.classes, *listing.paths}))
        assert len(listing.fingerprint) == 64
    except DatasetError as error:
        assert is_one_line(error), path
    finally:
        path.write_bytes(whole)
