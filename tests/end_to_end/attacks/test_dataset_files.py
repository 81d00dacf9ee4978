"""Damaged and hostile images, names, index files, archives and caches are read right, or one line says why not.

`pytest tests/end_to_end/attacks --attacks 1000` makes a thousand of each kind.
"""

import io
import os
import random
import shutil
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unicodedata import category

import numpy as np
import pytest
from PIL import Image

from benchmarks.backbones import WeightsError, load_weights
from benchmarks.datasets import IMAGE_DATASETS, DatasetError, Glyphs, ImageSet, folder, glyphs
from benchmarks.datasets.fetch import FetchError, unpack
from benchmarks.datasets.images import FORMATS, read_image
from benchmarks.datasets.listing import Listing
from benchmarks.datasets.transforms import ImageViews
from benchmarks.datasets.verify import verify
from tests.benchmarks.backbones.test_weights import SAVE, Network, values
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


@pytest.fixture
def attacks(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--attacks"))


# ------------------------------------------------------------------------------------------ images


def images(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Files' suffixes and contents: damaged ones of every format, also of those that are not to be opened."""
    draw = random.Random(seed)
    pixels = np.random.default_rng(seed).integers(256, size=(40, 48, 3), dtype=np.uint8)
    kinds = [*FORMATS, *FORMATS, "EPS", "ICO", "PCX", "TGA", "PDF", "SGI", "DDS", "MPO"]
    for _ in range(count):
        kind, file = draw.choice(kinds), io.BytesIO()
        mode = draw.choice(["L", "RGB"])
        options = {"save_all": True, "append_images": [Image.new("L", (48, 40))]}
        more = options if kind in ("GIF", "TIFF", "WEBP") and draw.random() < 0.3 else {}
        Image.fromarray(pixels).convert(mode).save(file, kind, **more)
        whole = file.getvalue()
        content = damaged(draw, whole) if draw.random() < 0.9 else whole
        yield draw.choice(["jpg", "png", "tif", kind.lower()]), content


def test_images(tmp_path: Path, attacks: int) -> None:
    for number, (suffix, content) in enumerate(images(0, attacks)):
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problems = verify(Listing("one", tmp_path, "flat", [path.name], ["a"], ["train"]))[1]
            try:
                assert read_image(path).mode == "RGB"
                assert problems == []
            except DatasetError as error:
                assert is_one_line(error), number
                assert len(problems) == 1
                assert problems[0].startswith(f"{path}: cannot be")
                assert is_one_line(ValueError(problems[0])), number
        path.unlink()


# ------------------------------------------------------------------------------------------- names

PIECES = (
    *("a", "Ω", "é", "e\u0301", "犬", "👩\u200d👧", " ", ".", "..", "-", "--data.root", "~"),
    *("\n", "\r", "\t", "\x1b[2J", "\x1b]0;x\x07", "\x7f", "\x9b", "\u202e", "\u2028"),
    *("\u202f", "\ufeff", "<script>", "&amp;", '"', "'", "\\", "%s", "{0}", "$(id)", "`id`"),
    *("CON", "C:", "|", "*", "x" * 200, "\udce9"),
)


def names(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Names of a class and of an image in it that this file system may or may not take."""
    draw = random.Random(seed)
    for _ in range(count):
        yield tuple("".join(draw.choices(PIECES, k=draw.randint(1, 3))) for _ in range(2))  # type: ignore[misc]


def test_names(tmp_path: Path, attacks: int) -> None:
    """A name that cannot be shown is refused; each other one is found, and its image is read."""
    views = ImageViews(image_size=16, mean=(0, 0, 0), std=(1, 1, 1))
    for number, (label, name) in enumerate(names(1, attacks)):
        root = tmp_path / str(number)
        for place in (root / "b" / "1.png", Path(f"{root}/{label}/{name}.png")):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (9, 9)).save(place, "PNG")
            except OSError:
                break
        else:
            hidden = label.startswith(".") or name.startswith(".")
            try:
                listing = folder.read(root, 0.5)
            except DatasetError as error:
                assert is_one_line(error), (label, name)
                continue
            assert hidden or f"{label}/{name}.png" in listing.paths
            assert listing.fingerprint
            for split in ("train", "test"):
                for image, _, _ in map(ImageSet(listing, split, views=views).__getitem__, [0]):  # type: ignore[arg-type]
                    assert image.shape == (3, 16, 16)
            report = verify(listing, num_workers=1)
            assert not report[1]
            assert all(is_shown(line.detail) for line in report[0])


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


def index_files(seed: int, count: int, roots: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """Trees, one of whose index files is changed until the next one is asked for."""
    draw = random.Random(seed)
    files = {
        name: [path for path in sorted(root.rglob("*")) if path.suffix in (".txt", ".csv", ".mat")]
        for name, root in roots.items()
    }
    for _ in range(count):
        name = draw.choice(list(roots))
        path = draw.choice(files[name])
        whole = path.read_bytes()
        if path.suffix == ".mat" or draw.random() < 0.3:
            path.write_bytes(damaged(draw, whole))
        else:
            path.write_bytes(hostile(draw, whole.decode()).encode("utf-8", "surrogateescape"))
        yield name, path
        path.write_bytes(whole)


def test_index_files(tmp_path: Path, attacks: int) -> None:
    """No listed image lies outside of the folder; what is wrong is a line."""
    roots = {}
    for name, (_, write) in TREES.items():
        write(roots.setdefault(name, tmp_path / name))
    for name, path in index_files(2, attacks, roots):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                listing = IMAGE_DATASETS[TREES[name][0]].read(roots[name])
            except DatasetError as error:
                assert is_one_line(error), path
                continue
        root = listing.root.resolve()
        for listed in listing.paths:
            assert (root / listed).resolve().is_relative_to(root), (path, listed)
            assert ".." not in listed.split("/")
        assert all(map(is_shown, {*listing.classes, *listing.paths}))
        try:
            assert len(listing.fingerprint) == 64
        except DatasetError as error:
            assert is_one_line(error), path


# ---------------------------------------------------------------------------------------- archives

MEMBERS = (
    *("a", "b/c.txt", "b/d/e.jpg", "./a", "a/b", "b", "", ".", "/", "//", "..", "../x"),
    *("b/../../x", "/tmp/x", "..\\x", "C:x", "C:\\x", "a\nb", "a\x1b[2J", "a\0b", "\udce9"),
    *("ä" * 200, "x" * 300, "d/" * 600 + "x", "A", "b/C.TXT", "3.00\u202fPM.png", "\u202ea"),
    *("con", " ", "b/ ", "link", "link/x", "link/../x"),
)
LINKS = ("..", "../x", "/etc", "/etc/passwd", "b", "b/../..", ".", "link", "a", "")


def archives(seed: int, count: int, place: Path) -> Iterator[Path]:
    """Archives with hostile members, damaged or whole; a name, a link or a kind that no dataset has."""
    draw = random.Random(seed)
    for number in range(count):
        path = place / f"{number}{draw.choice(['.zip', '.tar', '.tgz'])}"
        members = [
            (draw.choice(MEMBERS[:6] if draw.random() < 0.7 else MEMBERS), draw.randbytes(99))
            for _ in range(draw.randint(0, 6))
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two members of one name
            (_zip if path.suffix == ".zip" else _tar)(draw, path, members)
        if draw.random() < 0.5:
            path.write_bytes(damaged(draw, path.read_bytes()))
        yield path
        path.unlink()


def _zip(draw: random.Random, path: Path, members: list[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members:
            member = zipfile.ZipInfo(name.replace("\udce9", "\xe9"))
            if draw.random() < 0.1:
                member.external_attr = (stat.S_IFLNK | 0o777) << 16
                content = draw.choice(LINKS).encode()
            kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)
            file.writestr(member, content, draw.choice(kinds))


def _tar(draw: random.Random, path: Path, members: list[tuple[str, bytes]]) -> None:
    special = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name.replace("\0", ""))
            member.mode = draw.choice([0o644, 0o6777, 0])
            if draw.random() < 0.3:
                member.type, member.linkname = draw.choice(special), draw.choice(LINKS)
                file.addfile(member)
            else:
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def test_archives(tmp_path: Path, attacks: int) -> None:
    """Files, links and folders of one folder, or a line and nothing at all."""
    place, target = tmp_path / "archives", tmp_path / "out" / "set"
    place.mkdir()
    for archive in archives(3, attacks, place):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                unpack(archive, target)
            except FetchError as error:
                assert is_one_line(error), archive
                assert str(error).startswith(f"{archive}: ")
                assert not target.exists()
        for path in target.rglob("*"):
            assert Path(os.path.realpath(path)).is_relative_to(target), archive  # of a loop, too
            assert path.is_file() or path.is_dir() or path.is_symlink(), archive
        shutil.rmtree(target, ignore_errors=True)
        assert {path.name for path in tmp_path.rglob("*")} == {
            "archives",
            "out",
            archive.name,
        }


# ----------------------------------------------------------------------------------- cached glyphs


def test_cached_glyphs(
    tmp_path: Path,
    attacks: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The images are those that were rendered, and no second line follows the first."""
    monkeypatch.setattr(glyphs, "FACES", dict(list(glyphs.FACES.items())[:2]))
    monkeypatch.setattr(glyphs, "DRAWABLE", "N")
    draw = random.Random(4)
    expected = Glyphs(tmp_path, image_size=16)
    (path,) = tmp_path.glob("*.npz")
    for _ in range(attacks):
        whole = path.read_bytes()
        if draw.random() < 0.2:  # whole, with other images
            with np.load(path) as archive:
                other = {**archive, "images": np.roll(archive["images"], 1, draw.randrange(4))}
            np.savez_compressed(path, **other)
        else:
            path.write_bytes(damaged(draw, whole))
        capsys.readouterr()
        found = Glyphs(tmp_path, image_size=16)
        assert found.fingerprint == expected.fingerprint
        assert np.array_equal(found._images, expected._images)
        assert found.class_names == expected.class_names
        said = capsys.readouterr().err.splitlines()
        assert said in (
            [],
            [f"{path}: is damaged or of another version; rendering the glyphs again"],
        )
        assert said == [] or path.read_bytes() == whole
        path.write_bytes(whole)


# ------------------------------------------------------------------------------- files of weights


def test_weights(tmp_path: Path, attacks: int) -> None:
    """A file fills every tensor, or a line says why not; no code in it runs."""
    draw = random.Random(5)
    files = {tmp_path / f"weights.{suffix}": save for suffix, save in SAVE.items()}
    for path, save in files.items():
        save(values(Network()), path)
    wholes = {path: path.read_bytes() for path in files}
    for _ in range(attacks):
        path = draw.choice(list(files))
        path.write_bytes(damaged(draw, wholes[path]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load_weights(Network(), path)
            except WeightsError as error:
                assert is_one_line(error), path
