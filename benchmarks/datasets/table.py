"""A table of one's own: a CSV or Parquet file with a row for each image; docs/datasets.md has the columns.

OML has the first of the names that a column may have, wildlife-datasets `identity` and `bbox`.
"""

import csv
import io
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.datasets.folder import held_out
from benchmarks.datasets.listing import Box, DatasetError, Listing, is_usable, read_text, reading

CORNERS = ("x_1", "y_1", "x_2", "y_2")
NAMES = {
    **{"path": ("path",), "label": ("label", "identity"), "split": ("split",)},
    **{"query": ("is_query", "query"), "gallery": ("is_gallery", "gallery")},
    **{name: (name,) for name in (*CORNERS, "bbox")},
}
"""The names that a column may have, by its meaning."""

SPLITS = {"train": False, "validation": True, "val": True, "test": True}
"""The splits, and if their rows are for testing."""

FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
EMPTY = ("", "nan", "none", "null")
"""Cells without a value, as other programs write them."""

Line = tuple[str, Sequence[str]]
"""A line's place in words, and its cells."""


def read(
    file: Path,
    root: Path,
    test_classes: Path | float | None = None,
    *,
    known_classes: bool = False,
    default: float | None = 0.5,
) -> Listing:
    """List the images of a table, in its order.

    Test images are all queries and gallery at once, or each is one of the two. If only one of the columns is there,
    the other one is its opposite.

    Args:
        root: The folder that relative paths start from; all images lie in it.
        test_classes: Only without a column `split`: as of a folder.
        known_classes: Allow that classes to test on are trained on, too.
        default: The fraction if neither the table nor `test_classes` says it; None: all.

    Raises:
        DatasetError: naming the file, and the line and column, of what cannot be used.
        ValueError: if test_classes or known_classes does not suit the table.
    """
    rows = [*_rows(file)]
    if not rows:
        raise DatasetError(f"{file}: has no rows; expected one for each image")
    paths, classes = [row.path(root) for row in rows], [row.label() for row in rows]
    boxes = [row.box() for row in rows]
    seen: dict[tuple[str, Box | None], _Row] = {}
    for row, path, box in zip(rows, paths, boxes, strict=True):
        if (first := seen.setdefault((path, box), row)) is not row:
            raise DatasetError(
                f"{row.place}: lists {path} as {first.line} does; remove one of them"
            )
    if len(names := sorted(set(classes))) < 2:
        raise DatasetError(f"{file}: all rows are of the class {names[0]!r}; expected two or more")
    if "split" in rows[0].names:
        if test_classes is not None:
            raise ValueError(
                f"test_classes: {file} has a column split, which decides; leave it out"
            )
        tested = [row.tests() for row in rows]
        _check_splits(rows)
        if not known_classes:
            _check_unknown(rows, classes, tested)
    else:
        if known_classes:
            raise ValueError(
                f"known_classes: needs a column split, and {file} has none; add it, or leave this out"
            )
        chosen = default if test_classes is None else test_classes
        held = {*names} if chosen is None else held_out(chosen, names)
        tested = [name in held for name in classes]
    parts = [row.part() if test else "train" for row, test in zip(rows, tested, strict=True)]
    _check_sides(dict(zip(reversed(parts), reversed(rows), strict=True)))
    shown = boxes if any(boxes) else None
    lists = (paths, classes, parts)
    places = [row.place for row in rows]
    return Listing("table", root, "table", *lists, upright=True, boxes=shown, places=places)


@dataclass(frozen=True)
class _Row:
    """A row of a table."""

    file: Path
    line: str  # its place there, in words
    names: Mapping[str, str]  # of columns, by their meaning
    cells: Mapping[str, str]  # their texts, by meaning

    @property
    def place(self) -> str:
        return f"{self.file}, {self.line}"

    def wrong(self, meaning: str, expected: str) -> DatasetError:
        return DatasetError(
            f"{self.place}, column {self.names[meaning]}: expected {expected}, got {self.cells[meaning]!r}"
        )

    def path(self, root: Path) -> str:
        """The image's path below the root."""
        path = Path(self.cells["path"])
        if path.is_absolute():  # without "..", and links as they are
            path, folder = (Path(os.path.normpath(p)) for p in (path, root.absolute()))
            path = path.relative_to(folder) if path.is_relative_to(folder) else path
        if not is_usable(path.as_posix()):
            raise self.wrong("path", f"the path of an image in {root}")
        return path.as_posix()

    def label(self) -> str:
        name = unicodedata.normalize("NFC", self.cells["label"])
        if not is_usable(name) or name.lower() in EMPTY:
            raise self.wrong("label", "the name of a class")
        if (self.names["label"], name) == ("identity", "unknown"):
            raise self.wrong("label", "a known individual (leave out the rows of unknown ones)")
        return name

    def tests(self) -> bool:
        if (split := self.cells["split"]) not in SPLITS:
            raise self.wrong("split", f"one of {', '.join(SPLITS)}")
        return SPLITS[split]

    def part(self) -> str:
        """The part of a row that tests."""
        found: dict[str, bool] = {}
        for side in ("query", "gallery"):
            if side in self.names:
                if (text := self.cells[side].lower()) not in FLAGS:
                    raise self.wrong(side, "true or false in a row that tests")
                found[side] = FLAGS[text]
        if not found:
            return "test"
        query = found.get("query", not found.get("gallery"))
        gallery = found.get("gallery", not query)
        if not (query or gallery):
            raise self.wrong("gallery", "true, as this test row is no query")
        return "test" if query and gallery else "query" if query else "gallery"

    def box(self) -> Box | None:
        """Left, top, right and bottom, in whole pixels; None if the cells are empty."""
        names = [name for name in ("bbox", *CORNERS) if name in self.names]
        cells = [self.cells[name] for name in names]
        if all(cell.lower() in EMPTY for cell in cells):
            return None
        text, sized = ", ".join(cells), names == ["bbox"]
        try:
            left, top, right, bottom = json.loads(text if sized else f"[{text}]")
            if sized:
                right, bottom = left + right, top + bottom
            box = round(left), round(top), round(right), round(bottom)
            if box[0] < box[2] and box[1] < box[3] and min(right - left, bottom - top) >= 1:
                return box
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass
        expected = "[left, top, width, height]" if sized else "left < right and top < bottom"
        raise DatasetError(
            f"{self.place}, column {', '.join(names)}: expected {expected} of at least a pixel, or nothing, got "
            f"{text!r}"
        )


def _check_sides(first: Mapping[str, _Row]) -> None:
    """Refuse, by the first row of each part, queries without a gallery, and rows of both beside rows of one."""
    sides = [side for side in ("query", "gallery") if side in first]
    if "test" in first and sides:
        raise DatasetError(
            f"{first['test'].place}: is query and gallery, but {first[sides[0]].line} only {sides[0]}; expected "
            "that all test rows are both, or each is one"
        )
    if len(sides) == 1:
        raise DatasetError(
            f"{first[sides[0]].place}: is only {sides[0]}, as all test rows are; expected queries and a gallery"
        )


def _check_splits(rows: Sequence[_Row]) -> None:
    """Refuse a third part, for which there is no use."""
    third = [row for row in rows if row.cells["split"] in ("validation", "val")]
    if third and any(row.cells["split"] == "test" for row in rows):
        raise third[0].wrong(
            "split",
            "train or test, as other rows are called test (settings are chosen on folds of the training classes: "
            "call the row train, or leave it out)",
        )


def _check_unknown(rows: Sequence[_Row], classes: Sequence[str], tested: Sequence[bool]) -> None:
    """Refuse test classes that train."""
    trained = {name for name, test in zip(classes, tested, strict=True) if not test}
    known = [i for i, name in enumerate(classes) if tested[i] and name in trained]
    if known:
        count = len({classes[i] for i in known})
        raise DatasetError(
            f"{rows[known[0]].place}, column split: {count:,} of the classes to test on are trained on, too, such "
            f"as {classes[known[0]]!r}; give each class one split, or, to test photographs of known classes, set "
            "data.known_classes to true"
        )


def _rows(file: Path) -> Iterator[_Row]:
    """The rows of a table, with the cells that have a meaning."""
    read_rows = _parquet if file.suffix.lower() in (".parquet", ".pq") else _csv
    with reading(file):
        (_, header), *lines = [*read_rows(file)] or [("", [""])]
        names = _names(file, header)
        places = {meaning: header.index(name) for meaning, name in names.items()}
        for line, cells in lines:
            if len(cells) != len(header):
                raise DatasetError(
                    f"{file}, {line}: expected {len(header)} cells, as the first line has, got {len(cells)}"
                )
            yield _Row(file, line, names, {m: cells[place] for m, place in places.items()})


def _csv(file: Path) -> Iterator[Line]:
    csv.field_size_limit(2**31 - 1)  # outlines of animals are long
    lines = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    begin = 1
    try:
        for cells in lines:
            if cells:
                yield f"line {begin}", cells
            begin = lines.line_num + 1
    except csv.Error as error:
        raise DatasetError(
            f'{file}, line {begin}: {error}; close its quotation marks, and write "" for one in a cell'
        ) from error


def _parquet(file: Path) -> Iterator[Line]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DatasetError(
            f"{file}: reading Parquet needs pyarrow; install it (pip install pyarrow), or save the table as CSV"
        ) from error
    known = [name for names in NAMES.values() for name in names]
    whole = parquet.read_table(file)
    names = [name for name in whole.column_names if name in known]
    yield "the header", names or whole.column_names
    columns = [whole.column(name).to_pylist() for name in names]
    for number, cells in enumerate(zip(*columns, strict=True), start=1):
        yield f"row {number}", ["" if cell is None else f"{cell}" for cell in cells]


def _names(file: Path, header: Sequence[str]) -> dict[str, str]:
    """The column of each meaning that the table has."""
    names: dict[str, str] = {}
    for meaning, possible in NAMES.items():
        several = [name for name in header if name in possible]
        if len(several) > 1:
            raise DatasetError(
                f"{file}: has columns {' and '.join(several)}, which mean the same; keep one"
            )
        if several:
            names[meaning] = several[0]
    corners = [name for name in CORNERS if name in names]
    for needed in ("path", "label", *(CORNERS if corners else ())):
        if needed not in names:
            raise DatasetError(
                f"{file}: expected a column {' or '.join(NAMES[needed])}, got {', '.join(header)}; the first line "
                "names the columns, with commas between them"
            )
    if corners and "bbox" in names:
        raise DatasetError(f"{file}: has boxes as bbox and as {', '.join(CORNERS)}; keep one")
    return names
