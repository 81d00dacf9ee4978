"""The rows of a table: what is read of a CSV or Parquet file, where text stays text.

OML has the first of the names that a column may have, wildlife-datasets `identity` and `bbox`.
"""

import csv
import io
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

from benchmarks.datasets.listing import Box, DatasetError, read_text, reading

CORNERS = ("x_1", "y_1", "x_2", "y_2")
NAMES = {
    **{"path": ("path",), "label": ("label", "identity"), "split": ("split",)},
    **{"query": ("is_query", "query"), "gallery": ("is_gallery", "gallery")},
    **{name: (name,) for name in (*CORNERS, "bbox")},
}
"""The names that a column may have, by its meaning; `read_rows` takes that of "group"."""

SPLITS = {"train": False, "validation": True, "val": True, "test": True}
"""The splits, and if their rows are for testing."""

FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
EMPTY = ("", "nan", "none", "null")
"""Cells without a value, as other programs write them."""

Line = tuple[str, Sequence[str]]
"""A line's place in words, and its cells."""


@dataclass(frozen=True)
class Row:
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
        path = Path(self._text("path"))
        if path.is_absolute():  # without "..", and links as they are
            path, folder = (Path(os.path.normpath(p)) for p in (path, root.absolute()))
            path = path.relative_to(folder) if path.is_relative_to(folder) else path
        return path.as_posix()

    def label(self) -> str:
        name = unicodedata.normalize("NFC", self._text("label"))
        unknown = self.names["label"] == "identity" and name == "unknown"
        if unknown or name.lower() in EMPTY:  # not one class of all images without one
            raise self.wrong("label", "a class (rename one of this name, or leave the row out)")
        return name

    def group(self, place: int) -> str:
        """The name of its group; without one, a name of its own."""
        name = unicodedata.normalize("NFC", self._text("group"))
        return f"\0{place}" if name.lower() in EMPTY else name

    def _text(self, meaning: str) -> str:
        """A cell; a blank at an end is refused, which nobody sees and which makes another name."""
        if self.cells[meaning] != self.cells[meaning].strip():
            raise self.wrong(meaning, "no blank at either end")
        return self.cells[meaning]

    def tests(self) -> bool:
        if (split := self.cells["split"]) not in SPLITS:
            raise self.wrong("split", f"one of {', '.join(SPLITS)}")
        return SPLITS[split]

    def part(self) -> str:
        """The part of a row that tests."""
        flags = {side: self._flag(side) for side in ("query", "gallery") if side in self.names}
        query = flags.get("query", not flags.get("gallery"))
        gallery = flags.get("gallery", not query or not flags)  # without columns, all are both
        if not (query or gallery):
            raise self.wrong("gallery", "true, as this test row is no query")
        return "test" if query and gallery else "query" if query else "gallery"

    def _flag(self, side: str) -> bool:
        if (text := self.cells[side].lower()) not in FLAGS:
            raise self.wrong(side, "true or false in a row that tests")
        return FLAGS[text]

    def box(self) -> Box | None:
        """Left, top, right and bottom, in whole pixels; None if the cells are empty."""
        names = [name for name in ("bbox", *CORNERS) if name in self.names]
        cells = [self.cells[name] for name in names]
        if all(cell.lower() in EMPTY for cell in cells):
            return None
        text, sized = ", ".join(cells), names == ["bbox"]
        try:
            numbers = json.loads(text if sized else f"[{text}]")
            left, top, right, bottom = numbers
            if sized:
                right, bottom = left + right, top + bottom
            # Halves go up, so that a side of a pixel stays one.
            box = floor(left + 0.5), floor(top + 0.5), floor(right + 0.5), floor(bottom + 0.5)
            large = min(right - left, bottom - top) > 1 - 1e-6
            if large and box[0] < box[2] and box[1] < box[3] and bool not in map(type, numbers):
                return box
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass
        expected = "[left, top, width, height]" if sized else "left < right and top < bottom"
        raise DatasetError(
            f"{self.place}, column {', '.join(names)}: expected {expected} of at least a pixel, or nothing, got "
            f"{text!r}"
        )


def read_rows(file: Path, group: str | None = None) -> list[Row]:
    """The rows of a table, with the cells that have a meaning.

    Args:
        group: The column of the groups; None: there are none.
    """
    meanings = NAMES if group is None else {**NAMES, "group": (group,)}
    known = [name for names in meanings.values() for name in names]
    if file.is_dir():
        raise DatasetError(
            f"{file}: is a folder, whose folders' names would change labels such as 01 to 1; save the table as one "
            "file, CSV in UTF-8 or Parquet"
        )
    with reading(file):
        with file.open("rb") as start:
            is_parquet = start.read(4) == b"PAR1"
        lines = _parquet(file, known) if is_parquet else _csv(file)
        if (header := next(lines, None)) is None:
            raise DatasetError(f"{file}: is empty; expected a line with the columns' names")
        columns = [name.strip() for name in header[1]]
        names = _names(file, columns, meanings)
        rows = []
        for line, cells in lines:
            if len(cells) != len(columns):
                raise DatasetError(
                    f"{file}, {line}: expected {len(columns)} cells, as the first line has, got {len(cells)}"
                )
            row = dict(zip(columns, cells, strict=True))
            rows.append(Row(file, line, names, {key: row[name] for key, name in names.items()}))
    return rows


def _csv(file: Path) -> Iterator[Line]:
    csv.field_size_limit(2**31 - 1)  # outlines of animals are long
    text = read_text(file, "save the table as CSV in UTF-8, or as Parquet")
    # A blank behind a comma is none of a label or a path.
    lines = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
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


def _parquet(file: Path, known: Sequence[str]) -> Iterator[Line]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DatasetError(
            f"{file}: reading Parquet needs pyarrow; install it (pip install pyarrow), or save the table as CSV"
        ) from error
    whole = parquet.ParquetFile(file)  # which makes no columns of folders' names
    header = whole.schema_arrow.names
    names = [name for name in header if name in known] or header
    yield "the header", names
    # A column that is there twice is read once, and refused by the header.
    columns = [column.to_pylist() for column in whole.read(columns=[*set(names)]).select(names)]
    for number, cells in enumerate(zip(*columns, strict=True), start=1):
        texts = (cell.decode() if isinstance(cell, bytes) else cell for cell in cells)
        yield f"row {number}", ["" if text is None else f"{text}" for text in texts]


def _names(
    file: Path, header: Sequence[str], meanings: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """The column of each meaning that the table has."""
    names: dict[str, str] = {}
    for meaning, possible in meanings.items():
        given = [name for name in header if name in possible]
        if len(given) > 1:
            raise DatasetError(
                f"{file}: has columns {' and '.join(given)}, which mean the same; keep one"
            )
        names.update((meaning, name) for name in given)
    corners = CORNERS if {*CORNERS} & {*names} else ()
    for needed in ("path", "label", *corners, *({"group"} & {*meanings})):
        if needed not in names:
            raise DatasetError(
                f"{file}: expected a column {' or '.join(meanings[needed])}, got {', '.join(header)}; the first "
                "line names the columns, with commas between them"
            )
    if corners and "bbox" in names:
        raise DatasetError(f"{file}: has boxes as bbox and as {', '.join(CORNERS)}; keep one")
    return names
