"""A table of one's own: what is read of it, in the words of OML and wildlife-datasets, and what is refused."""

import gzip
import re
import shlex
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pytest
from PIL import Image
from pyarrow import feather, parquet

from benchmarks.building.images import build_datasets
from benchmarks.datasets import __main__, table
from benchmarks.datasets.decoded import DecodedImages
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.listing import DatasetError
from benchmarks.datasets.queries import count_queries
from benchmarks.datasets.remarks import verify_command
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError

SPLIT = "path,label,split"


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


def built(root: Path, **settings: Any) -> Any:
    """The images of an experiment on the table that was written last."""
    file = root.with_suffix(".csv")
    return build_datasets(Data(dataset="table", root=root, table=file, **settings))


def verify(root: Path, *words: str) -> int:
    file = root.with_suffix(".csv")
    return __main__.main(["verify", "table", f"--data.root={root}", f"--data.table={file}", *words])


def test_a_table_of_oml(photographs):
    """Training rows leave the flags empty; "validation" tests, every image as a query and in the gallery.

    Paths may be whole.
    """
    lines = [f"{photographs.absolute()}/{row}" for row in rows("ab", ",train,,,birds")]
    lines += rows("cd", ",validation,True,True,birds")
    listing = read(photographs, f"{SPLIT},is_query,is_gallery,category", *lines)
    assert (listing.root, listing.upright, listing.boxes) == (photographs, True, None)
    assert listing.counts() == {"train": (6, 2), "test": (6, 2)}
    assert (listing.paths[0], listing.paths[6], listing.classes[0]) == ("a0.png", "c0.png", "a")
    flags = ["1,0,", "1.0,0.0,", "False,True,"] * 2
    lines[6:] = [f"{row},test,{flag}" for row, flag in zip(rows("cd"), flags, strict=True)]
    write(photographs, f"{SPLIT},is_query,is_gallery,category", *lines)
    train, test, _ = built(photographs)
    assert train.ranking is None
    assert test.ranking.queries.tolist() == [True, True, False] * 2
    tested = [f"{row},{i % 3 == 0}" for i, row in enumerate(rows("ab"))]
    for column, other in (("query", "gallery"), ("gallery", "query")):  # one of them suffices
        listing = read(photographs, f"path,label,{column}", *tested, default=None)
        assert listing.parts == [column, other, other] * 2


def test_a_table_of_wildlife_datasets(photographs):
    """Boxes are cut out of upright images: a turned picture is 30 wide and 40 high; its white half lies below."""
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(photographs / "a0.png") as image:
        image.save(photographs / "a0.png", exif=exif)
    lines = ['a0.png,a,"[0, 20, 30, 90]"', *(f'{row},"[20.4, 0.0, 19.8, 30]"' for row in rows("b"))]
    listing = read(photographs, "path,identity,bbox", *lines)
    assert listing.boxes == [(0, 20, 30, 110)] + [(20, 0, 40, 30)] * 3
    assert sorted(set(listing.parts)) == ["test", "train"]  # half of the classes
    seen = [ImageSet(listing, "all").image(i) for i in (0, 1)]
    assert [image.size for image in seen] == [(30, 20), (20, 30)]  # the rest lies outside
    assert all(np.asarray(image).min() == 255 for image in seen)


def test_boxes_of_oml_are_what_is_seen(photographs, capsys):
    """Left, top, right, bottom; a picture without a box is seen whole; one may be listed with several."""
    head = f"{SPLIT},x_1,x_2,y_1,y_2"
    whole = read(photographs, head, *rows("ab", ",train,,,,"), *rows("cd", ",test,,,,"))
    lines = [f"{row},{box}" for row in rows("cd", ",test") for box in ("0,20,10,30", "9,20,0,30")]
    listing = read(photographs, head, *rows("ab", ",train,,,,"), *lines)
    assert whole.boxes is None
    assert listing.boxes == [None] * 6 + [(0, 10, 20, 30), (9, 0, 20, 30)] * 6
    images = ImageSet(listing, "all")
    assert images.image(0).size == (40, 30) and images.image(6).size == (20, 20)
    assert np.asarray(images.image(6)).max() == 40
    assert whole.fingerprint != listing.fingerprint
    of_whole = ImageSet(whole, "all").digests[6]
    assert of_whole.pixels != images.digests[6].pixels
    assert of_whole.content == images.digests[6].content
    train, test, _ = built(photographs)
    assert train.digests + test.digests == images.digests
    decoded = DecodedImages(test, test.labels.device).open()
    assert decoded.nbytes == sum(np.asarray(test.image(i)).size for i in range(12))
    assert verify(photographs) == 0
    assert "0 of 18 cannot be used" in capsys.readouterr().out


def test_a_parquet_file_says_the_same(photographs, tmp_path, monkeypatch):
    """Numbers, truth values, lists and nulls; text stays text, as bytes and in a folder named like a column."""
    columns: dict[str, Any] = {
        "path": ["a0.png", "a1.png", "b0.png", "b1.png"],
        "label": [b"1", b"1", b"01", b"01"],
        "is_query": [True, False, True, False],
        "bbox": [[0.0, 0.0, 5.0, 5.0], None, None, None],
        "outline": [b"x"] * 4,
    }
    (folder := tmp_path / "label=7").mkdir()

    def read_columns() -> Any:
        parquet.write_table(pyarrow.table(columns), file := folder / "x.pq")
        return table.read(file, photographs, default=None)

    assert read_columns().classes == ["1", "1", "01", "01"]
    columns["label"] = [7, 7, 8, 8]
    listing = read_columns()
    assert listing.classes == ["7", "7", "8", "8"]
    assert listing.parts == ["query", "gallery"] * 2
    assert listing.boxes == [(0, 0, 5, 5), None, None, None]
    columns["label"][2] = None
    with pytest.raises(DatasetError, match=r"x.pq, row 3, column label: expected a class"):
        read_columns()
    parts = {"path": columns["path"], "label": ["1", "01", "001", "2"]}
    parquet.write_to_dataset(pyarrow.table(parts), tmp_path / "d.pq", partition_cols=["label"])
    with pytest.raises(DatasetError, match=r"d.pq: is a folder, .* labels such as 01 to 1; save"):
        table.read(tmp_path / "d.pq", photographs)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"x.pq: reading Parquet needs pyarrow; install it"):
        table.read(folder / "x.pq", photographs)


def test_a_box_of_a_pixel_is_one_wherever_it_begins(photographs):
    boxes = [[0.5, 1.5, 1, 1], [4.1, 0.3, 1, 1.2], [1.5, 2.5, 2, 1.5]]
    lines = [*(f'a{j}.png,a,"{box}"' for j, box in enumerate(boxes)), *rows("b", ",")]
    boxes = read(photographs, "path,label,bbox", *lines).boxes
    assert boxes[:3] == [(1, 2, 2, 3), (4, 0, 5, 2), (2, 3, 4, 4)]


def test_a_blank_behind_a_comma_is_no_part_of_a_cell(photographs):
    lines = ("path, label ,split", "a0.png, a, train", 'a1.png, "a",train', "b0.png,b, test")
    listing = read(photographs, *lines, "b1.png,b,test")
    assert listing.paths[0] == "a0.png" and listing.classes == ["a", "a", "b", "b"]


def test_an_image_is_named_with_its_line(photographs, capsys):
    file = write(photographs, "path,label,bbox", *rows("a", ","), *rows("b", ',"[40, 0, 5, 5]"'))
    (photographs / "a1.png").write_bytes(b"damaged")
    damaged = f"{file}, line 3: {photographs / 'a1.png'}: cannot be read (UnidentifiedImageError"
    missing = f"{file}, line 4: {photographs / 'a2.png'}: cannot be read (No such file"
    outside = f"{file}, line 5: {photographs / 'b0.png'}: the box (40, 0, 45, 5) (left, top, right,"
    with pytest.raises(DatasetError, match=re.escape(outside)):
        ImageSet(table.read(file, photographs), "all").image(3)
    (photographs / "a2.png").unlink()
    with pytest.raises(ConfigError, match=re.escape(f"data.table: {missing}")):
        built(photographs)
    assert verify(photographs) == 1
    output = capsys.readouterr().out
    assert all(f"\n{line}" in output for line in (damaged, missing, outside))


CORNERS = ", line 5, column x_1, y_1, x_2, y_2: expected left < right and top < bottom of at least"
BOX = ", line 5, column bbox: expected [left, top, width, h"


def test_a_fault_names_file_line_and_column(photographs):
    for head, row, line in (
        ("path,class", "a0.png,a", ": expected a column label or identity, got path, class; the"),
        ("path,label,identity", "a0.png,a,a", ": has columns label and identity, which mean the"),
        ("path,label,x_1", "a0.png,a,3", ": expected a column y_1, got path, label, x_1; the"),
        ("path,label,bbox,x_1,y_1,x_2,y_2", "a0.png,a,,,,,", ": has boxes as bbox and as x_1, y_1"),
        ("path,label", "a0.png,a,b", ", line 5: expected 2 cells, as the first line has, got 3"),
        ("path,label", "../a0.png,a", ", line 5: the name '../a0.png' has control characters, le"),
        ("path,label", 'a0.png," b"', ", line 5, column label: expected no blank at either end,"),
        ("path,label", r"c\a0.png,a", ": 1 of 4 paths have backslashes, as Windows writes them,"),
        ("path,label", "a0.png,NaN", ", line 5, column label: expected a class (rename one of"),
        ("path,label,bbox", 'a0.png,a,"[true, 2, 3, 4]"', BOX),
        ("path,identity", "a0.png,unknown", ", line 5, column identity: expected a class (ren"),
        (SPLIT, "a0.png,a,valid", ", line 5, column split: expected one of train, vali"),
        (SPLIT, "a0.png,a,validation", ", line 5, column split: expected train or test, as other"),
        ("path,label,is_query", "a0.png,a,", ", line 5, column is_query: expected true or false"),
        ("path,label", 'a0.png,"a', ", line 5: unexpected end of data; close its quotation marks"),
        ("path,label,note", 'b0.png,b,"1\n2"', ", line 5: lists b0.png as line 2 does; remove one"),
        ("path,label,bbox", 'a0.png,a,"[1, 2, 0, 4]"', BOX),
        ("path,label,x_1,y_1,x_2,y_2", "a0.png,a,0.1,0.1,0.9,0.9", CORNERS),
    ):
        more = {"split": "test", "is_query": "1"}
        cells = "".join(f",{more.get(name, '')}" for name in head.split(",")[2:])
        file = write(photographs, head, *rows("b", cells), row)
        with pytest.raises(DatasetError, match=re.escape(f"{file}{line}")):
            table.read(file, photographs, default=None)


def test_flags_that_exclude_each_other_are_refused(photographs):
    for first, second, line in (
        ("0,0", "0,0", "line 2, column gallery: expected true, as this test row"),
        ("1,0", "1,0", "line 2: is only query, as all test rows are"),
    ):
        with pytest.raises(DatasetError, match=line):
            lines = [*rows("a", f",{first}"), *rows("b", f",{second}")]
            read(photographs, "path,label,query,gallery", *lines, default=None)


def test_rows_of_both_sides_stand_beside_rows_of_one(photographs, capsys):
    """Flags of c and d: a query, both, the gallery; b has a query that nothing answers but the other both."""
    tested = [f"{row},test,{flags}" for row, flags in zip(rows("bcd"), FLAGS, strict=True)]
    write(photographs, f"{SPLIT},query,gallery", *rows("a", ",train,,"), *tested)
    listing = table.read(photographs.with_suffix(".csv"), photographs)
    both = {"query": (3, 3), "gallery": (2, 2), "test": (4, 3)}
    assert listing.counts() == {"train": (3, 1), **both}
    ranking = ImageSet(listing, "test").ranking
    assert ranking.queries.tolist() == [True, True, True, *[True, True, False] * 2]
    assert ranking.gallery.tolist() == [False, True, True, *[False, True, True] * 2]
    assert verify(photographs) == 0
    out = capsys.readouterr().out
    assert "query 3 / 3, query and gallery 4 / 3, gallery 2 / 2" in out and " 7 queries\n" in out
    with pytest.raises(DatasetError, match=r"line 3: lists a0.png .*; an image that is query and"):
        read(photographs, "path,label,query", "a0.png,a,1", "a0.png,a,0", "b0.png,b,1")


FLAGS = ("1,0", "1,1", "1,1", *("1,0", "1,1", "0,1") * 2)


def test_images_of_a_camera_or_a_sequence_leave_rankings(photographs, capsys, tmp_path):
    """Class a is of one camera; the first of b has none, and is found by all others of b."""
    cells = ["x", "x", "x", "", "x", "x", "x", "y", "y", "y", "x", "z"]
    lines = [f"{row},{cell}" for row, cell in zip(rows("abcd"), cells, strict=True)]
    file = write(photographs, "path,label,shot by", *lines)
    for setting, answered, told in (
        ({"camera": "shot by"}, 9, "cameras +11 images of 3; 1 of none"),
        ({"sequence": "shot by"}, 9, "sequences +11 images of 3; 1 of none"),
    ):
        listing = table.read(file, photographs, default=None, **setting)
        images = ImageSet(listing, "test")
        assert images.ranking.whole_groups == ("sequence" in setting)
        assert count_queries(images.labels, images.ranking) == (12, 12 - answered)
        assert listing.fingerprint != table.read(file, photographs, default=None).fingerprint
        [(name, value)] = setting.items()
        assert verify(photographs, f"--data.{name}={value}", "--data.test_classes=0.5") == 0
        assert re.search(f"\n{told}", capsys.readouterr().out)
    parquet.write_table(pyarrow.csv.read_csv(file), other := tmp_path / "t.pq")
    assert table.read(other, photographs, default=None, sequence="shot by").groups == listing.groups
    with pytest.raises(DatasetError, match="expected a column cam, got path, label, shot by; the"):
        read(photographs, "path,label,shot by", *lines, camera="cam")
    with pytest.raises(ConfigError, match=r"data.sequence: data.camera names the groups already"):
        built(photographs, camera="shot by", sequence="shot by")
    write(photographs, "path,label,shot by", *rows("abcd", ",x"))
    with pytest.raises(ConfigError, match=r"class has a gallery image left \(images of a query's"):
        built(photographs, camera="shot by")


def test_known_classes_are_tested_where_the_user_says_so(photographs):
    lines = [f"{row},{'test' if '2' in row or 'd' in row else 'train'}" for row in rows("abcd")]
    file = write(photographs, SPLIT, *lines)
    line = f"data.table: {file}, line 4, column split: 3 of the classes to test on are trained on, too, such as 'a'"
    with pytest.raises(ConfigError, match=re.escape(line)):
        built(photographs)
    train, test, _ = built(photographs, known_classes=True)
    assert (train.class_names, len(train)) == (["a", "b", "c"], 6)
    assert (test.class_names, len(test)) == (["a", "b", "c", "d"], 6)
    assert not {train.name(i) for i in range(6)} & {test.name(i) for i in range(6)}
    data = Data(dataset="table", root=photographs, table=file, known_classes=True)
    words = shlex.split(verify_command(vars(data)))
    assert words[:3] == ["python", "-m", "benchmarks.datasets"] and __main__.main(words[3:]) == 0


def test_settings_that_do_not_suit_the_table(photographs):
    file = write(photographs, "path,label", *rows("abcd"))
    assert built(photographs, test_classes=0.5).test.num_classes == 2
    with pytest.raises(ConfigError, match=r"data.known_classes: needs a column split, and"):
        built(photographs, known_classes=True)
    write(photographs, SPLIT, *rows("ab", ",train"), *rows("cd", ",test"))
    with pytest.raises(ConfigError, match=r"data.test_classes: .* has a column split, which"):
        built(photographs, test_classes=0.5)
    for data, line in (
        (Data(dataset="table"), "expected the table's file, as data.dataset is table, got none"),
        (Data(dataset="cub", table=file), "cub has no table; leave it out"),
    ):
        assert [*data.faults()] == [f"data.table: {line}"]


def test_queries_with_nothing_to_find_are_counted(photographs, capsys):
    """Class c stands in the queries alone; then no class is on both sides."""
    for c, d, status, told in (
        ("1", ("1", "0", "0"), 0, "ok      4 queries, of which 3 have nothing to find and do"),
        ("1", ("0", "0", "0"), 1, "FAILED  3 queries, of which 3 have nothing .* in the gallery"),
    ):
        tested = [*rows("c", f",test,{c}"), *(f"d{j}.png,d,test,{d[j]}" for j in range(3))]
        write(photographs, f"{SPLIT},is_query", *rows("ab", ",train,"), *tested)
        assert verify(photographs) == status
        assert re.search(rf"\nqueries +{told}", capsys.readouterr().out)
    with pytest.raises(ConfigError, match=r"no query's class is in the gallery, .* none of 3"):
        built(photographs)


def test_a_table_that_cannot_be_read(photographs):
    file = photographs.with_suffix(".csv")
    with pytest.raises(DatasetError, match=rf"{file}: cannot be read \(No such file"):
        table.read(file, photographs)
    with pytest.raises(DatasetError, match=f"{file}: has no rows; expected one for each image"):
        read(photographs, "path,label")
    file.write_bytes(b"")
    with pytest.raises(DatasetError, match=f"{file}: is empty"):
        table.read(file, photographs)
    text = "\n".join(["path,label", *rows("ab")]).encode()
    feather.write_feather(pyarrow.table({"path": ["a0.png"]}), arrow := BytesIO())
    for content in (gzip.compress(text), b"PK\3\4\0\0" + text, arrow.getvalue()):
        file.write_bytes(content)
        with pytest.raises(DatasetError, match="; save the table as CSV in UTF-8, or as Parquet"):
            table.read(file, photographs)
