"""Files and folders that several processes write at once."""

import subprocess
import sys

import pytest

from benchmarks.console.writing import InUseError, OwnedFolder, alone, replace_file, replacing
from tests.support.processes import ROOT, TIMEOUT

COUNTER = """
import math, sys
from pathlib import Path
from benchmarks.console.writing import OwnedFolder, alone
folder = Path(sys.argv[1])
count = folder.with_name("count")
input()
for i in range(20):
    with OwnedFolder(folder, patience=math.inf), alone(count, wait=True):
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_an_interrupted_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half of")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x", tmp_path):  # the second one is a folder
        with pytest.raises(OSError) as caught:
            replace_file(path, b"new")
        assert caught.value.filename == f"{path}"
    with pytest.raises(OSError) as caught, alone(tmp_path / "file" / "x"):
        pass
    assert caught.value.filename == f"{tmp_path / 'file' / 'x'}"
    assert not [*tmp_path.parent.glob(".*.tmp")]


def test_one_process_at_a_time_owns_a_folder(tmp_path):
    """Also while its owners delete it."""
    (tmp_path / "count").write_text("0")
    words = [sys.executable, "-c", COUNTER, str(tmp_path / "folder")]
    processes = [subprocess.Popen(words, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=TIMEOUT)  # closes the pipe
    assert (tmp_path / "count").read_text() == "60"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["count", "folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [".lock"]


def test_a_moved_folder_stays_owned(tmp_path):
    with OwnedFolder(tmp_path / "a") as folder:
        folder.move(tmp_path / "b")
        with pytest.raises(InUseError):
            OwnedFolder(tmp_path / "b")
        OwnedFolder(tmp_path / "a").close()
    OwnedFolder(tmp_path / "b").close()


class Late(OwnedFolder):
    """Its folder is moved between locking and looking."""

    def _sign(self, lock: int) -> None:
        if not (moved := self.path.with_name("b")).exists():
            self.path.rename(moved)
        super()._sign(lock)


def test_a_folder_that_was_moved_while_it_was_locked_is_made_again(tmp_path):
    with Late(tmp_path / "a"):
        OwnedFolder(tmp_path / "b").close()
        with pytest.raises(InUseError):
            OwnedFolder(tmp_path / "a")


KILLED = """
import os, sys, time
from multiprocessing import get_context
from pathlib import Path
from benchmarks.console.writing import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]))
get_context("fork").Process(target=time.sleep, args=(5,)).start()
os.kill(os.getpid(), 9)
"""


def test_a_killed_owners_forked_process_does_not_keep_the_folder(tmp_path):
    """As a data-loader worker, which lives on for seconds."""
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(words, cwd=ROOT, timeout=TIMEOUT)
    assert killed.returncode == -9 and (tmp_path / ".lock").exists()
    OwnedFolder(tmp_path).close()


def test_what_a_killed_process_left_of_a_target_is_deleted(tmp_path):
    left = tmp_path / ".target.partial" / "work" / "half"
    left.mkdir(parents=True)
    with alone(tmp_path / "target") as folder:
        assert list(folder.iterdir()) == []
        (folder / "whole").touch()
        folder.rename(tmp_path / "target")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "whole"]
