"""A table of one's own: what is read of it, in the words of OML and wildlife-datasets, and what is refused."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.building import build_datasets
from benchmarks.datasets import DatasetError, DecodedImages, __main__, table, verify_command
from benchmarks.datasets.remarks import remarks
from benchmarks.settings import ConfigError, Data

OML = "path,label,split,is_query,is_gallery,category\n"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Four classes of three pictures, each 40 x 30 and of one gray, but for a white right half."""
    root = tmp_path / "photographs"
    root.mkdir()
    for i, name in enumerate("abcd"):
        for j in range(3):
            pixels = np.full((30, 40, 3), 20 * i + 5 * j, np.uint8)
            pixels[:, 20:] = 255
            Image.fromarray(pixels).save(root / f"{name}{j}.png")
    return root


def write(root: Path, *lines: str) -> Path:
    file = root.with_suffix(".csv")
    file.write_text("\n".join(lines) + "\n")
    return file


def rows(classes: str, text: str = "") -> list[str]:
    return [f"{name}{j}.png,{name}{text}" for name in classes for j in range(3)]


def read(root: Path, *lines: str, **settings: Any) -> Any:
    return table.read(write(root, *lines), root, **settings)


def test_a_table_of_oml(photographs: Path) -> None:
    """Training rows leave the flags empty; "validation" tests, every image as a query and in the gallery."""
    lines = [*rows("ab", ",train,,,birds"), *rows("cd", ",validation,True,True,birds")]
    found = read(photographs, OML.strip(), *lines)
    assert (found.name, found.root, found.upright, found.boxes) == (
        *("table", photographs, True),
        None,
    )
    assert found.counts() == {"train": (6, 2), "test": (6, 2)}
    assert found.paths[:4] == ["a0.png", "a1.png", "a2.png", "b0.png"]
    assert found.classes[0] == "a"


def test_queries_and_gallery_of_oml(photographs: Path) -> None:
    flags = ["1,0", "1.0,0.0", "False,True"] * 2
    tested = [f"{row},test,{flag}" for row, flag in zip(rows("cd"), flags, strict=True)]
    head = "path,label,split,is_query,is_gallery"
    found = read(photographs, head, *rows("ab", ",train,,"), *tested)
    assert found.parts == ["train"] * 6 + ["query", "query", "gallery"] * 2
    data = Data(dataset="table", root=photographs, table=photographs.with_suffix(".csv"))
    train, test, _ = build_datasets(data)
    assert train.is_query is None
    assert test.is_query.tolist() == [True, True, False] * 2


@pytest.mark.parametrize(("column", "parts"), [("query", "query"), ("gallery", "gallery")])
def test_one_of_the_two_columns_suffices(photographs: Path, column: str, parts: str) -> None:
    tested = [f"{row},{i % 3 == 0}" for i, row in enumerate(rows("ab"))]
    found = read(photographs, f"path,label,{column}", *tested, default=None)
    other = {"query": "gallery", "gallery": "query"}[column]
    assert found.parts == [parts, other, other] * 2


def test_a_table_of_wildlife_datasets(photographs: Path) -> None:
    lines = [
        f'{i},{name}{j}.png,{name},"[20.4, 0.0, 19.8, 30]"'
        for i, (name, j) in enumerate((name, j) for name in "ab" for j in range(3))
    ]
    found = read(photographs, "image_id,path,identity,bbox", *lines)
    assert found.boxes == [(20, 0, 40, 30)] * 6
    assert sorted(set(found.parts)) == ["test", "train"]  # half of the classes
    assert found.image(0).size == (20, 30)
    assert np.asarray(found.image(0)).min() == 255


def test_boxes_of_oml_are_what_is_seen(photographs: Path) -> None:
    """Left, top, right, bottom; a picture without a box is seen whole; decoded once, it is the same."""
    head = "path,label,split,x_1,x_2,y_1,y_2"
    lines = [*rows("ab", ",train,,,,"), *rows("cd", ",test,0,20,10,30")]
    found = read(photographs, head, *lines)
    assert found.boxes == [None] * 6 + [(0, 10, 20, 30)] * 6
    assert found.image(0).size == (40, 30) and found.image(6).size == (20, 20)
    assert np.asarray(found.image(6)).max() == 40
    data = Data(dataset="table", root=photographs, table=photographs.with_suffix(".csv"))
    train, test, _ = build_datasets(data)
    for images in (train, test):
        decoded = DecodedImages(images, images.labels.device).open()
        assert decoded.nbytes == sum(np.asarray(images.image(i)).size for i in range(6))
    whole = read(photographs, head, *rows("ab", ",train,,,,"), *rows("cd", ",test,,,,"))
    assert whole.fingerprint != found.fingerprint
    assert whole.boxes is None
    assert whole.digests[6].pixels != found.digests[6].pixels
    assert whole.digests[6].content == found.digests[6].content


def test_a_box_is_cut_out_of_the_upright_image(photographs: Path) -> None:
    """A turned picture is 30 wide and 40 high; its white half lies below."""
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(photographs / "a0.png") as image:
        image.save(photographs / "a0.png", exif=exif)
    lines = ['a0.png,a,"[0, 20, 30, 90]"', *rows("b", ",")]
    found = read(photographs, "path,label,bbox", *lines)
    assert found.image(0).size == (30, 20)  # what is below the image is left out
    assert np.asarray(found.image(0)).min() == 255


def test_a_box_outside_of_its_image_is_told(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(photographs, "path,label,bbox", 'a0.png,a,"[40, 0, 5, 5]"', *rows("b", ","))
    line = f"{photographs / 'a0.png'}: the box (40, 0, 45, 5) (left, top, right, bottom) lies outside of its 40"
    with pytest.raises(DatasetError) as caught:
        _ = table.read(file, photographs).digests
    assert str(caught.value).startswith(line)
    verify = ["verify", "table", f"--data.root={photographs}", f"--data.table={file}"]
    assert __main__.main(verify) == 1
    assert line in capsys.readouterr().out


def test_several_parts_of_one_image_are_no_copies(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        f"{name}{j}.png,{name}{side},{10 * side},0,{10 * side + 9},{9}"
        for name in "ab"
        for j in range(3)
        for side in (0, 1)
    ]
    file = write(photographs, "path,label,x_1,y_1,x_2,y_2", *lines)
    verify = ["verify", "table", f"--data.root={photographs}", f"--data.table={file}"]
    assert __main__.main(verify) == 0
    output = capsys.readouterr().out
    assert "0 of 12 cannot be used" in output
    assert table.read(file, photographs).fingerprint in output


def test_paths_may_be_whole(photographs: Path) -> None:
    lines = [f"{photographs.absolute()}/{row}" for row in rows("ab")]
    assert read(photographs, "path,label", *lines).paths == [
        row.split(",")[0] for row in rows("ab")
    ]


def test_the_fingerprint_is_of_what_the_table_says(photographs: Path) -> None:
    head, train, tested = "path,label,split", rows("ab", ",train"), rows("cd", ",test")
    first = read(photographs, head, *train, *tested).fingerprint
    assert (
        read(photographs, f"{head},note", *(f"{row},x" for row in train + tested)).fingerprint
        == first
    )
    other = [
        [*train, *tested[:-1]],
        [*train, *tested[:-1], "d2.png,c,test"],
        [*rows("abc", ",train"), *rows("d", ",test")],
    ]
    for lines in other:
        assert read(photographs, head, *lines).fingerprint != first


@pytest.mark.parametrize(
    ("head", "row", "line"),
    [
        (
            "path,class",
            "a0.png,a",
            ": expected a column label or identity, got path, class; the first",
        ),
        (
            "path;label",
            "a0.png;a",
            ": expected a column path, got path;label; the first line names",
        ),
        (
            "path,label,identity",
            "a0.png,a,a",
            ": has columns label and identity, which mean the same",
        ),
        (
            "path,label,x_1",
            "a0.png,a,3",
            ": expected a column y_1, got path, label, x_1; the first",
        ),
        ("path,label", "a0.png,a,b", ", line 5: expected 2 cells, as the first line has, got 3"),
        ("path,label", "../a0.png,a", ", line 5, column path: expected the path of an image in "),
        ("path,label", "/etc/a0.png,a", ", line 5, column path: expected the path of an image in "),
        ("path,label", "a0.png,", ", line 5, column label: expected the name of a class, got ''"),
        (
            "path,identity",
            "a0.png,unknown",
            ", line 5, column identity: expected a known individual",
        ),
        ("path,label", "b0.png,b", ", line 5: lists b0.png as line 2 does; remove one of them"),
        (
            "path,label,split",
            "a0.png,a,valid",
            ", line 5, column split: expected one of train, vali",
        ),
        (
            "path,label,is_query",
            "a0.png,a,",
            ", line 5, column is_query: expected true or false in a",
        ),
        (
            "path,label,bbox",
            'a0.png,a,"[1, 2, 0, 4]"',
            ", line 5, column bbox: expected [left, top, w",
        ),
        ("path,label", "a0.png,NaN", ", line 5, column label: expected the name of a class"),
        (
            "path,label,x_1,y_1,x_2,y_2",
            "a0.png,a,0.1,0.1,0.9,0.9",
            ", line 5, column x_1, y_1, x_2, y_2: expected left < right and top < bottom of at least",
        ),
        (
            "path,label,bbox",
            "a0.png,a,1 2 3 4",
            ", line 5, column bbox: expected [left, top, width, h",
        ),
        (
            "path,label,x_1,y_1,x_2,y_2",
            "a0.png,a,5,,9,9",
            ", line 5, column x_1, y_1, x_2, y_2: expected left < right and top < bottom of at least",
        ),
    ],
)
def test_a_fault_names_file_line_and_column(
    photographs: Path, head: str, row: str, line: str
) -> None:
    more = {"split": "test", "is_query": "1"}
    cells = "".join(f",{more.get(name, '')}" for name in head.split(",")[2:])
    good = [f"b{j}.png,b{cells}" for j in range(3)]
    file = write(photographs, head, *good, row)
    with pytest.raises(DatasetError) as caught:
        table.read(file, photographs, default=None)
    assert str(caught.value).startswith(f"{file}{line}")


def test_flags_that_exclude_each_other_are_refused(photographs: Path) -> None:
    head = "path,label,split,query,gallery"
    with pytest.raises(
        DatasetError, match="line 2, column gallery: expected true, as this test row"
    ):
        read(photographs, head, *rows("ab", ",test,0,0"))
    with pytest.raises(DatasetError, match="line 5: is query and gallery, but line 2 only query"):
        read(photographs, head, *rows("a", ",test,1,0"), *rows("b", ",test,1,1"))
    with pytest.raises(DatasetError, match="line 5: is query and gallery, but line 2 only gallery"):
        read(photographs, head, *rows("a", ",test,0,1"), *rows("b", ",test,1,1"))
    for side, flags in (("query", "1,0"), ("gallery", "0,1")):
        with pytest.raises(DatasetError, match=f"line 2: is only {side}, as all test rows are"):
            read(photographs, head, *rows("ab", f",test,{flags}"))


def test_a_third_part_has_no_use(photographs: Path) -> None:
    lines = [*rows("a", ",train"), *rows("b", ",test"), *rows("c", ",validation")]
    with pytest.raises(
        DatasetError, match="line 8, column split: expected train or test, as other"
    ):
        read(photographs, "path,label,split", *lines)


def test_known_classes_are_tested_where_the_user_says_so(photographs: Path) -> None:
    lines = [
        f"{name}{j}.png,{name},{'test' if j == 2 or name == 'd' else 'train'}"
        for name in "abcd"
        for j in range(3)
    ]
    file = write(photographs, "path,label,split", *lines)
    data = {"dataset": "table", "root": photographs, "table": file}
    line = f"data.table: {file}, line 4, column split: 3 of the classes to test on are trained on, too, such as 'a'"
    with pytest.raises(ConfigError) as caught:
        build_datasets(Data(**data))
    assert str(caught.value).startswith(line)
    train, test, _ = build_datasets(Data(**data, known_classes=True))
    assert (train.class_names, len(train)) == (["a", "b", "c"], 6)
    assert (test.class_names, len(test)) == (["a", "b", "c", "d"], 6)
    assert not {train.name(i) for i in range(6)} & {test.name(i) for i in range(6)}
    for known, status in ((None, 1), (True, 0)):
        printed = verify_command(vars(Data(**data, known_classes=known)))
        words = shlex.split(printed)
        assert words[:3] == ["python", "-m", "benchmarks.datasets"]
        assert __main__.main(words[3:]) == status


def test_settings_that_do_not_suit_the_table(photographs: Path) -> None:
    file = write(photographs, "path,label", *rows("abcd"))
    data = {"dataset": "table", "root": photographs, "table": file}
    assert build_datasets(Data(**data, test_classes=0.5)).test.num_classes == 2
    with pytest.raises(ConfigError, match=r"data.known_classes: needs a column split, and"):
        build_datasets(Data(**data, known_classes=True))
    write(photographs, "path,label,split", *rows("ab", ",train"), *rows("cd", ",test"))
    with pytest.raises(
        ConfigError, match=r"data.test_classes: .* has a column split, which decides"
    ):
        build_datasets(Data(**data, test_classes=0.5))
    write(photographs, "path,label,split", *rows("ab", ",test"))
    with pytest.raises(ConfigError, match=r"data.table: .* all images to train on are missing"):
        build_datasets(Data(**data))
    assert [*Data(dataset="table").faults()] == [
        "data.table: expected the table's file, as data.dataset is table, got none"
    ]
    assert [*Data(dataset="cub", table=file).faults()] == [
        "data.table: cub has no table; leave it out"
    ]


def test_parquet_needs_its_package(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"x.parquet: reading Parquet needs pyarrow; install it"):
        table.read(Path("x.parquet"), photographs)


class Column(list[Any]):
    def to_pylist(self) -> list[Any]:
        return self


def test_a_table_in_utf_16_is_read(photographs: Path) -> None:
    file = write(photographs, "path,label", *rows("ab"))
    expected = table.read(file, photographs)
    file.write_text(file.read_text(), encoding="utf-16")
    assert table.read(file, photographs) == expected


def test_an_image_is_named_with_its_line(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(photographs, "path,label", *rows("ab"))
    (photographs / "a1.png").unlink()
    (photographs / "b2.png").write_bytes(b"damaged")
    missing = f"{file}, line 3: {photographs / 'a1.png'}: cannot be read (FileNotFoundError"
    damaged = f"{file}, line 7: {photographs / 'b2.png'}: cannot be read (UnidentifiedImageError"
    with pytest.raises(ConfigError) as caught:
        build_datasets(Data(dataset="table", root=photographs, table=file))
    assert str(caught.value).startswith(f"data.table: {missing}")
    listing = table.read(file, photographs)
    for look, line in ((lambda: listing.digests, missing), (lambda: listing.image(5), damaged)):
        with pytest.raises(DatasetError) as error:
            look()
        assert str(error.value).startswith(line)
    assert __main__.main(["verify", "table", f"--data.root={photographs}", f"--data.table={file}"])
    output = capsys.readouterr().out
    assert f"\n{missing}" in output and f"\n{damaged}" in output


@pytest.mark.parametrize(
    ("train", "test", "counts"), [("abcd", "", "4 classes to train on, 0"), ("ab", "c", "2 .*, 1")]
)
def test_a_training_needs_classes_of_both_uses(
    photographs: Path, train: str, test: str, counts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*rows(train, ",train"), *rows(test, ",test")]
    file = write(photographs, "path,label,split", *lines)
    assert (
        __main__.main(["verify", "table", f"--data.root={photographs}", f"--data.table={file}"])
        == 0
    )
    assert re.search(
        rf"\nboth uses .*{counts} to test on: a training needs", capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match=f"data.table: {file}: all images to test on are "):
        build_datasets(Data(dataset="table", root=photographs, table=file))


def test_labels_that_may_be_one_are_told(photographs: Path) -> None:
    lines = [
        f"{name}.png,{label}"
        for name, label in zip(["a0", "b0", "c0"], [1, "1.0", "x/1"], strict=True)
    ]
    [(subject, text)] = remarks(read(photographs, "path,label", *lines), [None] * 3)
    assert subject == "same names"
    assert text.startswith("1 recur, such as 1 and 1.0, and") and "label in one way" in text


def test_a_parquet_file_says_the_same(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, truth values, lists and nulls, as pyarrow gives them."""
    columns = {
        "path": ["a0.png", "a1.png", "b0.png", "b1.png"],
        "label": [7, 7, 8, 8],
        "is_query": [True, False, True, False],
        "bbox": [[0.0, 0.0, 5.0, 5.0], None, None, None],
        "outline": [b"x"] * 4,
    }
    whole = SimpleNamespace(column_names=[*columns], column=lambda name: Column(columns[name]))
    parquet = SimpleNamespace(read_table=lambda file: whole)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    found = table.read(Path("x.parquet"), photographs, default=None)
    assert found.classes == ["7", "7", "8", "8"]
    assert found.parts == ["query", "gallery"] * 2
    assert found.boxes == [(0, 0, 5, 5), None, None, None]
    columns["label"][2] = None
    with pytest.raises(
        DatasetError, match=r"x.parquet, row 3, column label: expected the name of a"
    ):
        table.read(Path("x.parquet"), photographs, default=None)


def test_a_table_that_cannot_be_read(photographs: Path) -> None:
    with pytest.raises(DatasetError, match=r"none.csv: cannot be read \(FileNotFoundError"):
        table.read(Path("none.csv"), photographs)
    file = write(photographs, "path,label")
    with pytest.raises(DatasetError, match="has no rows; expected one for each image"):
        table.read(file, photographs)
    file.write_bytes("path,label\na.png,a\nb.png,b\xe9\n".encode("latin-1"))
    with pytest.raises(DatasetError, match=rf"{file}, line 3: is not UTF-8 text .*; save the file"):
        table.read(file, photographs)
    write(photographs, "path,label", *rows("a"))
    with pytest.raises(DatasetError, match=f"{file}: all rows are of the class 'a'; expected two"):
        table.read(file, photographs)
