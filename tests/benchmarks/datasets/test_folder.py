"""Your own folder of images."""

import os
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.datasets import folder
from benchmarks.datasets.listing import DatasetError

CLASSES = {"ant": 3, "bee": 2, "cat": 2, "Dog": 1, "eel": 2, "fox": 4}


@pytest.fixture
def root(tmp_path):
    """Empty files: nothing is opened."""
    for name, count in CLASSES.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.jpg").touch()
    return tmp_path


@pytest.fixture
def names(tmp_path_factory):
    """A writer of files that name the test classes."""
    file = tmp_path_factory.mktemp("names") / "test.txt"

    def write(text):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def held_out_by(listing):
    return {c for c, part in zip(listing.classes, listing.parts, strict=True) if part == "test"}


def test_images_are_sorted_by_class_and_path(root, names):
    listing = folder.read(root, names("ant\nfox\n"))
    assert (listing.name, listing.root) == ("folder", root)
    assert listing.paths[:3] == ["Dog/0.jpg", "ant/0.jpg", "ant/1.jpg"]
    assert listing.paths == sorted(listing.paths)
    assert listing.classes == [path.split("/")[0] for path in listing.paths]
    assert listing.counts() == {"train": (7, 4), "test": (7, 2)}
    assert held_out_by(listing) == {"ant", "fox"}


def test_images_lie_at_any_depth_and_other_files_are_left_out(root, names):
    for path in (
        "ant/2019/summer/big.PNG",
        "ant/.cache/thumb.jpg",
        "ant/._0.jpg",
        "ant/notes.txt",
        "ant/features.h5",
        "ant/clip.mpeg",
        "ant/drawing.eps",
        "ant/layers.psd",
        ".git/a.jpg",
        "README.md",
        "bee/new.webp",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    listing = folder.read(root, names("fox"))
    assert [path for path in listing.paths if path.startswith(("ant", "bee", "."))] == [
        *["ant/0.jpg", "ant/1.jpg", "ant/2.jpg", "ant/2019/summer/big.PNG"],
        *["bee/0.jpg", "bee/1.jpg", "bee/new.webp"],
    ]
    assert set(listing.classes) == set(CLASSES)


def test_classes_may_be_links(root, tmp_path_factory, names):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "1.gif").touch()
    (root / "gnu").symlink_to(elsewhere)
    assert "gnu/1.gif" in folder.read(root, names("fox")).paths


def test_the_list_of_classes_may_come_from_windows(root, names):
    listing = folder.read(root, names("\ufeffant\r\n\r\nfox \r\n"))
    assert held_out_by(listing) == {"ant", "fox"}


def test_a_fraction_is_held_out_by_name_alone(root):
    half = held_out_by(folder.read(root, 0.5))
    assert half == {"Dog", "bee", "ant"}  # the three lowest SHA-256
    assert len(held_out_by(folder.read(root, 0.34))) == 2
    assert held_out_by(folder.read(root, 0.34)) < half
    (root / "ant" / "9.jpg").touch()
    assert held_out_by(folder.read(root, 0.5)) == half


@pytest.mark.parametrize("test_classes", [0.0, 1.0, float("nan"), 0.05, 0.95])
def test_impossible_fractions(root, test_classes):
    message = rf"^test_classes: expected a fraction .* of 6 classes .*, got {test_classes}"
    with pytest.raises(ValueError, match=message):
        folder.read(root, test_classes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ant\ndog", r"test.txt: no class 'dog'; name one folder"),
        ("\n", r"test.txt: names 0 of 6 classes; name at least one"),
        ("\n".join(CLASSES), r"test.txt: names 6 of 6 classes; name at least one, and leave"),
        (b"ant\nb\xe9e\n", r"test.txt: cannot be read .'utf-8' codec can't"),
    ],
    ids=["unknown", "none", "all", "not UTF-8"],
)
def test_wrong_lists_of_classes(root, names, text, message):
    with pytest.raises(ValueError, match=message):
        folder.read(root, names(text))


def test_the_list_of_classes_may_be_a_pipe(root, names):
    """A pipe like a shell's `<(head -1 names.txt)`."""
    end, start = os.pipe()
    os.write(start, b"ant\n")
    os.close(start)
    assert held_out_by(folder.read(root, Path(f"/dev/fd/{end}"))) == {"ant"}
    os.close(end)


def test_a_missing_list_of_classes(root):
    with pytest.raises(
        ValueError, match=r"^test_classes: .*no.txt: cannot be read \(.*No such file"
    ):
        folder.read(root, root / "no.txt")


def test_an_image_beside_the_classes_is_refused(root):
    (root / "stray.jpeg").touch()
    with pytest.raises(
        DatasetError, match=rf"{root}: 'stray.jpeg' lies beside the folders of the c"
    ):
        folder.read(root, 0.5)


def test_a_class_without_images_is_refused(root):
    (root / "gnu").mkdir()
    (root / "gnu" / "index.html").touch()
    with pytest.raises(
        DatasetError, match=rf"{root / 'gnu'}: holds no image; .*\.jpeg, \.jpf, \.jpg"
    ):
        folder.read(root, 0.5)


@pytest.mark.parametrize("classes", [0, 1])
def test_too_few_classes_are_refused(tmp_path, classes):
    for name in ["only"][:classes]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
    with pytest.raises(
        DatasetError, match=f"holds {classes} folders of classes, expected two or more"
    ):
        folder.read(tmp_path, 0.5)


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_root_that_is_no_folder(tmp_path, kind):
    root = tmp_path / "root"
    if kind == "a file":
        root.touch()
    with pytest.raises(DatasetError, match=rf"{root}: cannot be read as a folder \((No|Not a)"):
        folder.read(root, 0.5)


@pytest.mark.parametrize("name", [b"b\xe9e", b"ant/caf\xe9.jpg"], ids=["class", "image"])
def test_a_name_that_is_not_utf8(root, name):
    path = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
    try:
        if path.suffix:
            path.touch()
        else:
            path.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(DatasetError) as error:
        folder.read(root, 0.5)
    assert "\\udce9" in str(error.value)


@pytest.mark.parametrize("name", ["a\nb.jpg", "\x1b[2J.jpg", "\u202egpj.exe.jpg", "\x9b31m.jpg"])
def test_a_name_that_a_terminal_would_obey(root, name):
    (root / "ant" / name).touch()
    with pytest.raises(DatasetError) as error:
        folder.read(root, 0.5)
    expected = f"{root}: the name {f'ant/{name}'!r} has control characters or is not UTF-8; rename"
    assert str(error.value).startswith(expected)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["3.00\u202fPM", "👩\u200d👧", "e\u0301", "<b>&'\"", "-"])
def test_a_name_that_can_be_shown(root, name):
    name = f"{name}.jpg"
    (root / "ant" / name).touch()
    assert f"ant/{name}" in folder.read(root, 0.5).paths


def test_a_link_back_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / "1.png")
    (tmp_path / "photos" / "a" / "back").symlink_to(tmp_path / "photos", target_is_directory=True)
    with pytest.raises(DatasetError, match=r"back: a link leads to .*photos again; remove"):
        folder.read(tmp_path / "photos", 0.5)
