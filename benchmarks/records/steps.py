"""Records of a run: its numbers, step by step.

`RunRecords` logs through record-keeper to csv, sqlite and TensorBoard. record-keeper only appends, so this file
handles resuming after a kill: before the first new row is written, the rows behind the checkpoint and a
half-written last line are removed from the csv and sqlite files.

A program that holds logs.db open in a transaction does not make a run wait for long: rows that the database does
not accept are written with later ones. If it is never free again, they stand only in the csv files.

NaN is kept as `nan` in the csv files, which `read_table` reads, and in TensorBoard; sqlite has no
NaN and stores NULL.
"""

import csv
import errno
import hashlib
import math
import sqlite3
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from record_keeper import RecordKeeper, RecordWriter
from record_keeper.db_utils import DBManager
from torch.utils.tensorboard import SummaryWriter

from benchmarks.records.files import file_digest, replace_file

STEP_COLUMN = "~iteration~"  # record-keeper's name of the first column

DATABASE = "logs.db"  # record-keeper's name of the sqlite file

PATIENCE = 5.0  # seconds to wait for a program that reads that file

REMEDY = "delete it to continue without its rows"

Row = tuple[int, Mapping[str, float]]
"""A step and its values by name."""


class RunRecords:
    """Tables of numbers by step, as csv files, one sqlite file and TensorBoard events.

    After a SIGKILL, reopen with `resume_step=S` and log the steps after S again: the csv and sqlite rows then
    equal those of a run that was never killed, if the rows up to S were logged before the checkpoint of step S
    was written. One process may write at a time.

    Args:
        folder: Folder of the files; created if it does not exist.
        resume_step: The step of the checkpoint that the run continues from (0: from the start). Rows of later
            steps are removed, or hidden in TensorBoard. None: a run's first start.
        digests: The result of `digests` at that step.

    Raises:
        ValueError: if resume_step is None and the folder already holds records, if records are damaged, or if a
            table's digest differs; then nothing is removed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        digests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        tables = sorted(folder.glob("*.csv"))
        if resume_step is None:
            if tables or (folder / DATABASE).exists():
                raise ValueError(
                    f"{folder}: already holds records; choose an empty folder, "
                    "or pass resume_step=... to cut them back and continue"
                )
        else:
            kept = {path: _cut_csv(path, resume_step) for path in tables}
            for path, content in kept.items():
                if (
                    path.stem in digests
                    and hashlib.sha256(content).hexdigest() != digests[path.stem]
                ):
                    raise ValueError(
                        f"{path}: its rows up to step {resume_step} are not those that the checkpoint was "
                        f"written after; put them back, or {REMEDY}"
                    )
            _check_database(folder / DATABASE, kept, resume_step)
            _cut_database(folder / DATABASE, resume_step)  # check all before anything is cut
            for path, content in kept.items():
                replace_file(path, content)
        self._columns: dict[str, list[str]] = {}
        self._last_step: dict[str, int] = {}
        for path in tables:
            names, rows = _read_csv(path)
            if names:
                self._columns[path.stem] = names[1:]
            if rows:
                self._last_step[path.stem] = int(rows[-1][0])
        purge_step = None if resume_step is None else resume_step + 1
        self._tensorboard = SummaryWriter(str(folder), purge_step=purge_step)
        writer = RecordWriter(str(folder))
        self._database = writer.local_db = _PatientDatabase(str(folder / DATABASE))
        self._keeper = RecordKeeper(self._tensorboard, writer)

    def log_rows(self, table: str, rows: Sequence[Row]) -> None:
        """Write rows of (step, values) and flush them; the whole call is checked first.

        record-keeper commits to sqlite and reads the whole csv file once per call, so pass many rows at once in a
        long run. Total processor time: 1 s for 1,500 steps in calls of 10 rows; for 20,000 steps, 49 s in calls
        of 10 rows and 9 s in calls of 100.

        Raises:
            ValueError: if the columns are not those of the table's first row, or if the steps do
                not rise.
        """
        columns = self._columns.get(table)
        last_step = self._last_step.get(table)
        for step, values in rows:
            if columns is None:
                columns = list(values)
            if set(values) != set(columns):
                raise ValueError(
                    f"table {table!r}, step {step}: missing columns "
                    f"{sorted(set(columns) - set(values))}, unknown columns "
                    f"{sorted(set(values) - set(columns))}; "
                    f"the first row fixed the columns to {columns}"
                )
            if last_step is not None and step <= last_step:
                raise ValueError(
                    f"table {table!r}: step {step} after step {last_step}; steps must rise"
                )
            last_step = step
        if columns is None or last_step is None:
            return
        for step, values in rows:
            # float(): record-keeper drops numpy scalars. A changed order of columns would give
            # the csv file a second header.
            self._keeper.update_records(
                {table: {name: float(values[name]) for name in columns}}, int(step)
            )
        self._keeper.save_records()
        self._tensorboard.flush()
        self._columns[table], self._last_step[table] = columns, last_step

    def digests(self) -> dict[str, str]:
        """SHA-256 of each table, to recognise its rows later."""
        return {path.stem: file_digest(path) for path in self.folder.glob("*.csv")}

    def close(self) -> None:
        """Close the TensorBoard file; all else is on disk, unless logs.db was locked all the time."""
        self._database.catch_up()
        self._tensorboard.close()


class _PatientDatabase(DBManager):
    """record-keeper's database, which keeps rows for later while another program locks the file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._waiting: deque[tuple[str, dict[str, list[float]]]] = deque()
        self._told = False

    def write(
        self, table_name: str, dict_of_lists: dict[str, list[float]], experiment_name: None = None
    ) -> None:
        self._waiting.append((table_name, dict_of_lists))
        self.catch_up()

    def catch_up(self) -> None:
        """Write the waiting rows, if the file is free.

        Raises:
            OSError: if it cannot be written at all.
        """
        try:
            while self._waiting:
                super().write(*self._waiting[0])
                self._waiting.popleft()
        except sqlite3.Error as error:
            self._let_go()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise OSError(errno.EIO, str(error), self.db_path) from error
            if not self._told:
                warnings.warn(
                    f"{self.db_path}: {error} by another program; its rows wait for the next time, and the csv "
                    "files beside it have them",
                    stacklevel=2,
                )
            self._told = True

    def _let_go(self) -> None:
        """End a failed transaction: an open cursor would keep its lock."""
        with suppress(AttributeError, sqlite3.ProgrammingError):  # never open, or closed already
            self.cursor.close()
            self.conn.rollback()
            self.conn.close()

    def open(self) -> None:
        self._let_go()
        self.conn = sqlite3.connect(self.db_path, timeout=0.1 if self._told else PATIENCE)
        self.conn.row_factory = sqlite3.Row
        self.cursor = self.conn.cursor()


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


def _check_database(path: Path, tables: Mapping[Path, bytes], last_step: int) -> None:
    """Refuse a database whose numbers differ from the csv files; rows may be missing."""
    if not path.exists():
        return
    there = "SELECT name FROM sqlite_master WHERE type = 'table'"
    with _opened(path) as database:
        names = {name for (name,) in database.execute(there)}
        for table in [table for table in tables if table.stem in names and tables[table]]:
            [columns, *rows] = csv.reader(tables[table].decode().splitlines())
            known = {int(row[0]): [str(float(value)) for value in row[1:]] for row in rows}
            listed = ", ".join(f'"{column}"' for column in columns)
            for step, *row in database.execute(f'SELECT {listed} FROM "{table.stem}"'):
                found = [str(math.nan if value is None else value) for value in row]
                begun = not 0 <= step < min(known, default=1)  # else the table was deleted
                if begun and step <= last_step and known.get(step) != found:
                    raise ValueError(
                        f"{path}: step {step} of {table.stem} is not that of {table.name}; {REMEDY}"
                    )


def _cut_database(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    # One transaction. The row ids are reset too, or sqlite would leave a gap.
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    with _opened(path) as database, database:
        for (table,) in database.execute(tables).fetchall():
            database.execute(f'DELETE FROM "{table}" WHERE "{STEP_COLUMN}" > ?', (last_step,))
            database.execute(
                f'UPDATE sqlite_sequence SET seq = (SELECT COALESCE(MAX(id), 0) FROM "{table}") '
                "WHERE name = ?",
                (table,),
            )


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the database; raise a ValueError that names the file if it cannot be used."""
    try:
        with closing(sqlite3.connect(path, timeout=PATIENCE)) as database:
            yield database
    except (sqlite3.Error, TypeError) as error:
        raise ValueError(
            f"{path}: {error}; close the program that has it open, or {REMEDY}"
        ) from error
