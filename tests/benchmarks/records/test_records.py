"""The records survive a kill: a resumed run leaves the same records as an unbroken run."""

import math
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from benchmarks.records import provenance
from benchmarks.records.steps import Ends, StepTables, read_table
from benchmarks.records.trackers import PROJECT, Trackers

Rows = list[tuple[int, dict[str, float]]]


def training_rows(first: int, last: int) -> Rows:
    return [
        (step, {"loss": 1 / step, "learning_rate": 1e-3 * step, "images_per_second": 80.0})
        for step in range(first, last + 1)
    ]


def evaluation_rows(*steps: int) -> Rows:
    return [(step, {"seen_recall_at_1": step / 97, "unseen_recall_at_1": 0.1}) for step in steps]


def write(folder: Path, training: Rows, evaluation: Rows, before: Ends | None = None) -> Ends:
    """Log rows behind those of a checkpoint; the ends of the tables."""
    run = StepTables(folder, before)
    for start in range(0, len(training), 4):
        run.log_rows("training", training[start : start + 4])
    if evaluation:
        run.log_rows("evaluation", evaluation)
    return run.ends()


def csv_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.csv")}


@pytest.fixture
def unbroken(tmp_path):
    folder = tmp_path / "unbroken"
    write(folder, training_rows(1, 20), evaluation_rows(5, 10, 15, 20))
    return folder


def test_reads_what_was_logged(unbroken):
    table = read_table(unbroken, "training")
    assert list(table) == ["step", "loss", "learning_rate", "images_per_second"]
    assert table["step"] == list(range(1, 21))
    assert table["loss"] == [1 / step for step in range(1, 21)]
    with closing(sqlite3.connect(unbroken / "logs.db")) as database:
        third = database.execute("SELECT * FROM training").fetchall()[2]
    assert third[:3] == (3, 3, 1 / 3)
    assert read_table(unbroken, "never_written") == {}


# 17 rows survive a kill in the flush of the 17th to 20th; then the file is cut: only the newline is
# torn, or the line holds its step alone.
@pytest.mark.parametrize(("torn_bytes", "step"), [(0, 0), (1, 8), (25, 16)])
def test_resume_equals_an_unbroken_log(tmp_path, unbroken, torn_bytes, step):
    folder, every = tmp_path / "killed", (5, 10, 15, 20)
    before = evaluation_rows(*(at for at in every if at <= step))
    ends = write(folder, training_rows(1, step), before)
    lost = evaluation_rows(*(at for at in every if step < at < 17))
    write(folder, training_rows(step + 1, 17), lost, ends)
    path = folder / "training.csv"
    path.write_bytes(path.read_bytes()[: -torn_bytes or None])
    assert len(read_table(folder, "training")["step"]) == (16 if torn_bytes else 17)

    left = evaluation_rows(*(at for at in every if at > step))
    write(folder, training_rows(step + 1, 20), left, ends)
    assert csv_files(folder) == csv_files(unbroken)
    assert not list(folder.glob(".*")), "a temporary file was left"


def test_tables_of_other_rows_are_refused_before_any_is_cut(unbroken, capsys):
    ends = write(unbroken, training_rows(1, 20), evaluation_rows(20))
    table = unbroken / "training.csv"
    table.write_bytes(table.read_bytes().replace(b"\n9,", b"\n9,1", 1))
    files = csv_files(unbroken)
    with pytest.raises(ValueError, match=r"training\.csv: its first \d+ bytes"):
        StepTables(unbroken, ends)
    assert csv_files(unbroken) == files
    table.unlink()  # as the error says
    StepTables(unbroken, ends)
    assert "training.csv is missing: its rows so far stay lost" in capsys.readouterr().out


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, monkeypatch):
    """As a tracker of Accelerate's."""
    # Names of its files end in a process's count of them, and 10 would be read before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for step, first, last in ((None, 1, 9), (5, 6, 12)):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        trackers = Trackers(accelerator, ["tensorboard"])
        trackers.start("run", {"seed": 0}, {}, step)
        trackers.log({"training": training_rows(first, last)})
        accelerator.end_training()
    events = EventAccumulator(str(tmp_path / PROJECT)).Reload().Scalars("training/loss")
    assert [event.step for event in events] == list(range(1, 13))


def test_columns_are_fixed_by_the_first_row_also_after_a_resume(tmp_path):
    run = StepTables(tmp_path)
    run.log_rows("training", [(1, {"loss": 1.0, "learning_rate": 0.1})])
    # Another order is the same columns: record-keeper alone would write a second header.
    run.log_rows("training", [(2, {"learning_rate": 0.1, "loss": 2.0})])
    run = StepTables(tmp_path, run.ends())
    for values in ({"loss": 3.0}, {"loss": 3.0, "learning_rate": 0.1, "extra": 0.0}):
        with pytest.raises(ValueError, match=r"step 3: expected .*'learning_rate'\], got"):
            run.log_rows("training", [(3, values)])
    for step, value in ((3, np.float32(0.5)), (4, math.inf), (5, math.nan)):
        run.log_rows("training", [(step, {"loss": value, "learning_rate": 0.1})])
    loss = read_table(tmp_path, "training")["loss"]
    assert loss[:4] == [1.0, 2.0, 0.5, math.inf] and math.isnan(loss[4])


def test_describe_code(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output([*command, *arguments], text=True).strip()

    def commit(path: str, text: str = "") -> str:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        git("add", path)
        git("commit", "-m", path)
        return git("rev-parse", "HEAD")

    module = tmp_path / "records.py"
    module.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(module))
    describe_code = provenance.describe_code.__wrapped__
    unknown = {"commit": None, "dirty": None}
    assert describe_code() == unknown, "no repository"
    git("init")
    commit("other.py")
    assert describe_code() == unknown, "another project's repository"
    commit("records.py")
    head = commit("docs/study", "before")
    (tmp_path / "docs" / "study").write_text("a command goes on after it has written its page")
    for name in ("photographs/a.jpg", "mine.py", "benchmarks/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a user's own")
    assert describe_code() == {"commit": head, "dirty": False}
    (tmp_path / "benchmarks" / "inner").mkdir()
    (new := tmp_path / "benchmarks" / "inner" / "new.py").write_text("")
    assert describe_code() == {"commit": head, "dirty": True}
    new.unlink()
    module.write_text("changed = True\n")
    assert describe_code() == {"commit": head, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_code() == unknown, "no git"


def test_a_processor_has_a_name_and_instructions_and_memory_is_in_gib(monkeypatch):
    monkeypatch.setattr("platform.processor", lambda: "A")  # Linux knows more of it
    assert ", " in provenance.describe_hardware()["processor"]
    assert 0.05 < provenance.peak_memory()["host"] < 50
