"""Records of a run: its numbers, step by step.

`RunRecords` logs through record-keeper to csv, sqlite and TensorBoard. record-keeper only appends, so this file
handles resuming after a kill: before the first new row is written, the rows behind the checkpoint and a
half-written last line are removed from the csv files. The sqlite file, `logs.db`, is record-keeper's alone and
keeps them: rows that were logged again have the larger `id`.

NaN is kept as `nan` in the csv files, which `read_table` reads, and in TensorBoard; sqlite has no
NaN and stores NULL.
"""

import csv
import errno
import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from record_keeper import RecordKeeper, RecordWriter
from torch.utils.tensorboard import SummaryWriter

from benchmarks.records.files import file_digest, replace_file

STEP_COLUMN = "~iteration~"  # record-keeper's name of the first column

REMEDY = "delete it to continue without its rows"

Row = tuple[int, Mapping[str, float]]
"""A step and its values by name."""


class RunRecords:
    """Tables of numbers by step, as csv files, one sqlite file and TensorBoard events.

    After a SIGKILL, reopen with `resume_step=S` and log the steps after S again: the csv rows then equal those of
    a run that was never killed, if the rows up to S were logged before the checkpoint of step S was written. One
    process may write at a time.

    Args:
        folder: Folder of the files; created if it does not exist.
        resume_step: The step of the checkpoint that the run continues from. Rows of later steps are removed, or
            hidden in TensorBoard. -1: no row is kept, not even that of step 0.
        digests: The result of `digests` at that step.

    Raises:
        ValueError: if records are damaged, or if a table's digest differs; then nothing is removed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int = -1,
        digests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = {path: _cut_csv(path, resume_step) for path in sorted(folder.glob("*.csv"))}
        for path, content in kept.items():
            digest = hashlib.sha256(content).hexdigest()
            if digests.get(path.stem, digest) != digest:
                raise ValueError(
                    f"{path}: its rows up to step {resume_step} are not those that the checkpoint was "
                    f"written after; put them back, or {REMEDY}"
                )
        for path, content in kept.items():
            replace_file(path, content)
        self._columns = {path.stem: names[1:] for path in kept if (names := _read_csv(path)[0])}
        self._tensorboard = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._keeper = RecordKeeper(self._tensorboard, RecordWriter(str(folder)))

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
            raise OSError(errno.EIO, str(error), str(self.folder / "logs.db")) from error
        self._tensorboard.flush()

    def digests(self) -> dict[str, str]:
        """SHA-256 of each table, to recognise its rows later."""
        return {path.stem: file_digest(path) for path in self.folder.glob("*.csv")}

    def close(self) -> None:
        """Close the TensorBoard file; all else is on disk."""
        self._tensorboard.close()


def read_table(folder: Path, table: str) -> dict[str, list[float]]:
    """Read the columns of a table, "step" first; {} if it was never written.

    A last line that is still being written is left out.
    """
    path = folder / f"{table}.csv"
    if not path.exists():
        return {}
    names, rows = _read_csv(path)
    return {
        "step" if name == STEP_COLUMN else name: [float(row[i]) for row in rows]
        for i, name in enumerate(names)
    }


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        header, *rows = list(csv.reader(line.decode() for line in _whole_lines(path))) or [[]]
        if header[:1] not in ([], [STEP_COLUMN]):
            raise ValueError(f"its first column is {header[0][:40]!r}, not {STEP_COLUMN!r}")
        for row in rows:
            if len([int(row[0]), *map(float, row[1:])]) != len(header):
                raise ValueError(f"{len(row)} values under {len(header)} names")
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise ValueError(f"{path}: is not a table of numbers ({error}); {REMEDY}") from error
    return header, rows


def _cut_csv(path: Path, last_step: int) -> bytes:
    (_, rows), lines = _read_csv(path), _whole_lines(path)
    kept = [of for of, row in zip(lines[1:], rows, strict=True) if int(row[0]) <= last_step]
    return b"".join(lines[:1] + kept)
