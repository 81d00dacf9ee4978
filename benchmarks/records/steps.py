"""Records of a run: its numbers, step by step.

`StepTables` logs through record-keeper to csv and sqlite. record-keeper only appends, so this file handles resuming
after a kill: before the first new row is written, the csv files are cut back to their ends at the checkpoint. The
sqlite file, `logs.db`, is record-keeper's alone and is not cut: of rows that were logged again, the later one has
the larger `id`.

NaN is kept as `nan` in the csv files, which `read_table` reads; sqlite has no NaN and stores NULL.
"""

import csv
import errno
import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from record_keeper import RecordKeeper, RecordWriter

from benchmarks.console.arguments import say
from benchmarks.console.writing import replace_file
from benchmarks.records.files import damage_named

REMEDY = "delete it to continue without its rows"

Row = tuple[int, Mapping[str, float]]
"""A step and its values by name."""

Ends = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of the csv files, by table."""


class StepTables:
    """Tables of numbers by step, as csv files and one sqlite file.

    After a SIGKILL, reopen with the `ends` of a checkpoint and log the steps after it again: the csv files then
    equal those of a run that was never killed. One process may write at a time.

    Args:
        folder: Folder of the files; created if it does not exist.
        ends: The result of `ends` at the checkpoint that the run continues from; without, no row is kept.

    Raises:
        ValueError: if a table is not that of the checkpoint; then nothing is removed.
    """

    def __init__(self, folder: Path, ends: Ends | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = {}
        for path in sorted(folder.glob("*.csv")):
            size, digest = (ends or {}).get(path.stem, (0, hashlib.sha256().hexdigest()))
            kept[path] = path.read_bytes()[:size]
            if hashlib.sha256(kept[path]).hexdigest() != digest:
                raise ValueError(
                    f"{path}: its first {size} bytes are not those that the checkpoint was written after; put them "
                    f"back, or {REMEDY}"
                )
        for lost in sorted((ends or {}).keys() - {path.stem for path in kept}):
            say(f"{folder / lost}.csv is missing: its rows so far stay lost")
        for path, content in kept.items():
            replace_file(path, content)
        tables = [path.stem for path, content in kept.items() if content]
        self._columns = {name: [*read_table(folder, name)][1:] for name in tables}
        self._keeper = RecordKeeper(record_writer=RecordWriter(str(folder)))

    def log_rows(self, table: str, rows: Sequence[Row]) -> None:
        """Write rows of (step, values) and flush them.

        record-keeper commits to sqlite and reads the whole csv file once per call, so pass many rows at once in a
        long run. Total processor time: 1 s for 1,500 steps in calls of 10 rows; for 20,000 steps, 49 s in calls
        of 10 rows and 9 s in calls of 100.

        Raises:
            ValueError: if the columns are not those of the table's first row; then no row is written.
            OSError: if a file cannot be written.
        """
        for step, values in rows:
            columns = self._columns.setdefault(table, list(values))
            if set(values) != set(columns):
                raise ValueError(
                    f"table {table!r}, step {step}: expected the columns of its first row, {columns}, got "
                    f"{list(values)}"
                )
            # float(): record-keeper drops numpy scalars. A changed order of columns would give
            # the csv file a second header.
            self._keeper.update_records(
                {table: {name: float(values[name]) for name in columns}}, int(step)
            )
        try:
            self._keeper.save_records()
        except sqlite3.Error as error:
            why = f"{error}; {REMEDY}" if type(error) is sqlite3.DatabaseError else f"{error}"
            raise OSError(errno.EIO, why, str(self.folder / "logs.db")) from error

    def ends(self) -> dict[str, tuple[int, str]]:
        """The ends of the tables so far, to cut them back later."""
        tables = {path.stem: path.read_bytes() for path in self.folder.glob("*.csv")}
        return {
            name: (len(rows), hashlib.sha256(rows).hexdigest()) for name, rows in tables.items()
        }


def read_table(folder: Path, table: str) -> dict[str, list[float]]:
    """Read the columns of a table, "step" first; {} if it was never written.

    A last line that is still being written is left out.

    Raises:
        ValueError: if it is no table of numbers.
    """
    path = folder / f"{table}.csv"
    if not path.exists():
        return {}
    with damage_named(path, REMEDY):
        lines = path.read_bytes().splitlines(keepends=True)
        rows = csv.reader(line.decode() for line in lines if line.endswith(b"\n"))
        names = ["step" if name == "~iteration~" else name for name in next(rows, [])]
        columns: dict[str, list[float]] = {name: [] for name in names}
        for row in rows:
            for column, cell in zip(columns.values(), row, strict=True):
                column.append(float(cell))
    return columns
