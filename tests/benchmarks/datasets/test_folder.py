"""Your own folder of images: which are listed, how classes are named, which of them test."""

import hashlib
from collections import Counter

import pytest

from benchmarks.datasets import folder
from benchmarks.datasets.listing import DatasetError

CLASSES = {"ant": 3, "bee": 2, "cat": 2, "Dog": 1, "eel": 2, "fox": 4}


def put(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


@pytest.fixture
def root(tmp_path):
    """Empty files: nothing is opened."""
    put(tmp_path, *(f"{name}/{i}.jpg" for name, count in CLASSES.items() for i in range(count)))
    return tmp_path


@pytest.fixture
def names(tmp_path_factory):
    """A writer of files that name the test classes."""
    file = tmp_path_factory.mktemp("names") / "test.txt"

    def write(text, encoding="utf-8"):
        file.write_bytes(text.encode(encoding))
        return file

    return write


def held_out_by(listing):
    return {c for c, part in zip(listing.classes, listing.parts, strict=True) if part == "test"}


def test_images_are_sorted_links_followed_and_other_files_left_out(root, names, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "1.gif").touch()
    (root / "gnu").symlink_to(elsewhere)
    put(root, "ant/BIG.PNG", "ant/.cache/thumb.jpg", "ant/._0.jpg", "ant/notes.txt", "ant/a.eps")
    put(root, ".git/a.jpg", "README.md", "bee/new.webp", "ant/notes/more.txt")
    listing = folder.read(root, names("ant\nfox\n"))
    assert listing.paths[:8] == [
        *["Dog/0.jpg", "ant/0.jpg", "ant/1.jpg", "ant/2.jpg", "ant/BIG.PNG"],
        *["bee/0.jpg", "bee/1.jpg", "bee/new.webp"],
    ]
    assert listing.classes == [path.split("/")[0] for path in listing.paths]
    assert listing.counts() == {"train": (9, 5), "test": (8, 2)}
    assert held_out_by(listing) == {"ant", "fox"}


def test_a_class_is_the_folder_that_holds_the_images_or_one_of_the_first(tmp_path, names):
    put(tmp_path, "Fruit/Apple/Gala/1.jpg", "Fruit/Apple/Fuji/1.jpg", "Fruit/Kiwi/2.jpg")
    put(tmp_path, "Milk/3.jpg")
    listing = folder.read(tmp_path, names("Fruit/Apple/Gala\nMilk\n"))
    assert listing.classes == ["Fruit/Apple/Fuji", "Fruit/Apple/Gala", "Fruit/Kiwi", "Milk"]
    assert held_out_by(listing) == {"Fruit/Apple/Gala", "Milk"}
    for level, classes in (
        (1, {"Fruit": 3, "Milk": 1}),
        (2, {"Fruit/Apple": 2, "Fruit/Kiwi": 1, "Milk": 1}),
        (9, dict.fromkeys(listing.classes, 1)),
    ):
        assert Counter(folder.read(tmp_path, 0.5, level).classes) == classes
    put(tmp_path, "Fruit/Kiwi/2019/2.jpg")
    message = r"Fruit/Kiwi: holds images, and so does 'Fruit/Kiwi/2019' .* set data\.class_level"
    with pytest.raises(DatasetError, match=message):
        folder.read(tmp_path, 0.5)
    assert folder.read(tmp_path, 0.5, 2).classes.count("Fruit/Kiwi") == 2


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("listed", [COMPOSED, DECOMPOSED])
def test_a_name_is_the_same_composed_and_decomposed(root, names, listed):
    put(root, f"{DECOMPOSED}/1.jpg", f"{COMPOSED}/2.jpg")
    listing = folder.read(root, names(listed))
    assert held_out_by(listing) == {COMPOSED}
    assert listing.classes.count(COMPOSED) == 2
    assert f"{DECOMPOSED}/1.jpg" in listing.paths  # as the file system has it


def test_the_list_of_classes_may_come_from_windows_and_spaces_are_a_part_of_a_name(root, names):
    put(root, " gnu /1.jpg")
    for encoding in ("utf-8-sig", "utf-16"):
        listed = names("ant\r\n\r\n gnu \r\n", encoding)
        assert held_out_by(folder.read(root, listed)) == {"ant", " gnu "}
    for encoding in ("utf-16-le", "latin-1"):
        with pytest.raises(ValueError, match=r"is not UTF-8 text .*; save the file as UTF-8"):
            folder.read(root, names("ant\nbée\n", encoding))


def test_a_fraction_is_held_out_by_name_alone(root):
    """Results of runs on folders depend on it: the lowest SHA-256."""
    half = held_out_by(folder.read(root, 0.5))
    assert half == {"Dog", "bee", "ant"}
    by_hash = sorted(CLASSES, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert held_out_by(folder.read(root, 0.34)) == {*by_hash[:2]} < half
    (root / "ant" / "9.jpg").touch()
    assert held_out_by(folder.read(root, 0.5)) == half


@pytest.mark.parametrize(
    ("paths", "chosen", "message"),
    [
        ([], 0.05, "^test_classes: expected a fraction .* of 6 classes .*, got 0.05"),
        ([], "\n".join(CLASSES), "of 6 classes to train on and some to test on, got .*test.txt$"),
        ([], "ant\ndog", "test.txt: no class 'dog'; name one class per line, .* such as 'Dog'"),
        (
            ["gnu/calf/1.jpg", "gnu/bull/index.html"],
            0.5,
            r"ROOT/gnu/bull: holds no image, but 1 \.[a-z]+; convert .*; .*\.jpf, \.jpg",
        ),
        (["b\udce9e/1.jpg"], 0.5, r"^ROOT: the name 'b\\udce9e' has control .* not UTF-8; rename"),
    ],
)
def test_what_is_wrong_is_named(root, names, paths, chosen, message):
    put(root, *paths)
    given = names(chosen) if isinstance(chosen, str) else chosen
    with pytest.raises(ValueError, match=message.replace("ROOT", str(root))) as error:
        folder.read(root, given)
    assert str(error.value).isprintable()


def test_a_root_without_classes_is_refused(tmp_path):
    put(tmp_path, "one/only/1.png")
    for name, line in (
        ("one", "expected two or more folders of classes, .* got 1;"),
        ("missing", r"missing: cannot be read \(No such file"),
    ):
        with pytest.raises(DatasetError, match=line):
            folder.read(tmp_path / name, 0.5)


@pytest.mark.parametrize("links", [{"x/a/y": "x"}, {"b/y": "a", "a/x": "b"}])
def test_a_link_without_an_end_is_named(links, tmp_path):
    put(tmp_path, "a/1.png", "x/a/1.png", "b/1.png")
    for link, target in links.items():
        (tmp_path / link).symlink_to((tmp_path / target).resolve())
    line = f"{tmp_path / link}.*: a link to a folder around it; remove it\\)$"  # no second remedy
    with pytest.raises(DatasetError, match=line):
        folder.read(tmp_path, 0.5)
