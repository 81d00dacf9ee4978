"""Your own folder of images."""

from collections import Counter

import pytest

from benchmarks.datasets import folder
from benchmarks.datasets.listing import DatasetError
from benchmarks.datasets.splits import validation_fold

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


def test_other_files_are_left_out_and_links_followed(root, names, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "1.gif").touch()
    (root / "gnu").symlink_to(elsewhere)
    put(root, "ant/BIG.PNG", "ant/.cache/thumb.jpg", "ant/._0.jpg", "ant/notes.txt", "ant/a.eps")
    put(root, ".git/a.jpg", "README.md", "bee/new.webp", "ant/notes/more.txt")
    listing = folder.read(root, names("fox"))
    assert [path for path in listing.paths if path.startswith(("ant", "bee", "."))] == [
        *["ant/0.jpg", "ant/1.jpg", "ant/2.jpg", "ant/BIG.PNG"],
        *["bee/0.jpg", "bee/1.jpg", "bee/new.webp"],
    ]
    assert set(listing.classes) == {*CLASSES, "gnu"}


def test_a_class_is_the_folder_that_holds_the_images_or_one_of_the_first(tmp_path, names):
    put(tmp_path, "Fruit/Apple/Gala/1.jpg", "Fruit/Apple/Fuji/1.jpg", "Fruit/Kiwi/2.jpg")
    put(tmp_path, "Milk/3.jpg")
    listing = folder.read(tmp_path, names("Fruit/Apple/Gala\nMilk\n"))
    assert listing.classes == ["Fruit/Apple/Fuji", "Fruit/Apple/Gala", "Fruit/Kiwi", "Milk"]
    assert listing.paths == [
        f"{name}/{number}.jpg" for name, number in zip(listing.classes, [1, 1, 2, 3], strict=True)
    ]
    assert held_out_by(listing) == {"Fruit/Apple/Gala", "Milk"}

    for level, classes in (
        (1, {"Fruit": 3, "Milk": 1}),
        (2, {"Fruit/Apple": 2, "Fruit/Kiwi": 1, "Milk": 1}),
        (9, dict.fromkeys(listing.classes, 1)),
    ):
        assert Counter(folder.read(tmp_path, 0.5, level).classes) == classes


def test_a_class_in_a_class_is_refused_unless_the_level_joins_them(tmp_path):
    put(tmp_path, "Fruit/Apple/1.jpg", "Fruit/Apple/2019/2.jpg", "Milk/3.jpg")
    message = r"Fruit/Apple: holds images, and so does 'Fruit/Apple/2019' .* set data\.class_level"
    with pytest.raises(DatasetError, match=message):
        folder.read(tmp_path, 0.5)
    assert folder.read(tmp_path, 0.5, 2).classes == ["Fruit/Apple", "Fruit/Apple", "Milk"]


def test_single_folders_keep_their_names_order_and_parts(root):
    """Their splits and folds are hashes of these names."""
    listing = folder.read(root, 0.5)
    assert dict.fromkeys(listing.classes) == dict.fromkeys(sorted(CLASSES))
    training = sorted({*CLASSES} - held_out_by(listing))
    assert training == ["cat", "eel", "fox"]
    held_out = [validation_fold(training, fold, 3)[1] for fold in range(3)]
    assert held_out == [["eel"], ["fox"], ["cat"]]


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("listed", [COMPOSED, DECOMPOSED])
def test_a_name_is_the_same_composed_and_decomposed(root, names, listed):
    put(root, f"{DECOMPOSED}/1.jpg")
    assert held_out_by(folder.read(root, names(listed))) == {COMPOSED}
    put(root, f"{COMPOSED}/2.jpg")
    listing = folder.read(root, names(listed))
    assert listing.classes.count(COMPOSED) == 2
    assert f"{DECOMPOSED}/1.jpg" in listing.paths  # as the file system has it


def test_the_list_of_classes_may_come_from_windows(root, names):
    for encoding in ("utf-8-sig", "utf-16"):
        listed = names("ant\r\n\r\nfox\r\n".encode(encoding))
        assert held_out_by(folder.read(root, listed)) == {"ant", "fox"}


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-16-le", "utf-32", "latin-1"])
def test_a_list_of_classes_in_another_encoding_is_named(root, names, encoding):
    with pytest.raises(ValueError, match=r"is not UTF-8 text .*; save the file as UTF-8"):
        folder.read(root, names("ant\nbée\n".encode(encoding)))


def test_spaces_are_a_part_of_a_name(root, names):
    put(root, " gnu /1.jpg", "лайка /1.jpg")
    assert held_out_by(folder.read(root, names(" gnu \nлайка \n"))) == {" gnu ", "лайка "}
    with pytest.raises(ValueError, match="no class 'gnu'; name one class per line"):
        folder.read(root, names("gnu\n"))


def test_a_fraction_is_held_out_by_name_alone(root):
    half = held_out_by(folder.read(root, 0.5))
    assert half == {"Dog", "bee", "ant"}  # the three lowest SHA-256
    assert len(held_out_by(folder.read(root, 0.34))) == 2
    assert held_out_by(folder.read(root, 0.34)) < half
    (root / "ant" / "9.jpg").touch()
    assert held_out_by(folder.read(root, 0.5)) == half


@pytest.mark.parametrize(
    ("paths", "chosen", "message"),
    [
        *(
            ([], share, f"^test_classes: expected a fraction .* of 6 classes .*, got {share}")
            for share in (0.0, 1.0, float("nan"), 0.05)
        ),
        ([], "ant\ndog", "test.txt: no class 'dog'; name one class per line, .* such as 'Dog'"),
        ([], "\n", "^test_classes: expected a .* of names, that leaves some of 6 .*test.txt$"),
        ([], "\n".join(CLASSES), "of 6 classes to train on and some to test on, got .*test.txt$"),
        (
            ["stray.jpeg"],
            0.5,
            "ROOT: holds images, and so does 'Dog' in it, .*; move the former into",
        ),
        (
            ["gnu/calf/1.jpg", "gnu/bull/index.html"],
            0.5,
            r"ROOT/gnu/bull: holds no image, but 1 \.[a-z]+; convert .*; .*\.jpf, \.jpg",
        ),
        (["b\udce9e/1.jpg"], 0.5, r"^ROOT: the name 'b\\udce9e' has control .* not UTF-8; rename"),
        (["ant/\u202egpj.exe.jpg"], 0.5, r"^ROOT: the name 'ant/\\u202egpj.exe.jpg' has control"),
    ],
)
def test_what_is_wrong_is_named(root, names, paths, chosen, message):
    put(root, *paths)
    given = names(chosen) if isinstance(chosen, str | bytes) else chosen
    with pytest.raises(ValueError, match=message.replace("ROOT", str(root))) as error:
        folder.read(root, given)
    assert str(error.value).isprintable()


def test_a_root_without_classes_is_refused(tmp_path):
    put(tmp_path, "one/only/1.png", "none/.hidden", "file")
    (tmp_path / "none" / ".hidden").unlink()
    for name, line in (
        ("none", "expected two or more folders of classes, .* got 0;"),
        ("one", "expected two or more folders of classes, .* got 1;"),
        ("missing", r"missing: cannot be read \(FileNotFound"),
        ("file", r"file: cannot be read \(NotADirectory"),
    ):
        with pytest.raises(DatasetError, match=line):
            folder.read(tmp_path / name, 0.5)
