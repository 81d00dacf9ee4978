"""Marks of rows whose code changed after they were measured."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.records import changed_since, code_changes

HORDE, JRD = "pml_regularizers.HORDELoss", "pml_regularizers.JRDLoss"


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A commit of this code in a repository of its own."""
    for package in ("pml_regularizers", "benchmarks"):
        shutil.copytree(
            code_changes.REPOSITORY / package,
            tmp_path / package,
            ignore=lambda folder, names: [
                name
                for name in names
                if not (name.endswith(".py") or (Path(folder) / name).is_dir())
            ],
        )
    monkeypatch.setattr(code_changes, "REPOSITORY", tmp_path)
    monkeypatch.setattr(code_changes, "LIBRARY", tmp_path / "pml_regularizers")

    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            *arguments,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    return git("rev-parse", "HEAD")


def change(file: str, old: str, new: str) -> None:
    path = code_changes.REPOSITORY / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_only_the_rows_whose_code_changed_are_marked(commit):
    assert changed_since(commit, [HORDE, JRD, "torch.optim.Adam"]) == []
    change("pml_regularizers/moments.py", "import ", "unused = 1\nimport ")  # horde.py imports it
    assert changed_since(commit, [HORDE]) == ["pml_regularizers/moments.py"]
    assert changed_since(commit, [JRD]) == []
    change("benchmarks/training/loop.py", "import ", "unused = 1\nimport ")
    assert changed_since(commit, [JRD]) == ["benchmarks/training/loop.py"]
    change("benchmarks/studies/jobs.py", "import ", "unused = 1\nimport ")
    assert changed_since(commit, [JRD]) == ["benchmarks/training/loop.py"]


def test_comments_docstrings_and_messages_are_no_change(commit):
    change("pml_regularizers/horde.py", '"""', '# a comment\n"""Other words. ')
    change("pml_regularizers/horde.py", "raise ValueError(", 'raise ValueError("other words"')
    assert "other words" in (code_changes.LIBRARY / "horde.py").read_text()
    assert changed_since(commit, [HORDE]) == []


def test_a_file_that_is_new_is_a_change(commit):
    change("pml_regularizers/horde.py", "import copy", "import copy\nfrom .new import one")
    (code_changes.LIBRARY / "new.py").write_text("one = 1\n")
    assert changed_since(commit, [HORDE]) == [
        "pml_regularizers/horde.py",
        "pml_regularizers/new.py",
    ]


def test_an_unknown_commit_is_said_to_be_unknown(commit):
    assert changed_since("0" * 40, [HORDE]) is None
    shutil.rmtree(code_changes.REPOSITORY / ".git")
    assert changed_since("0" * 39 + "1", [HORDE]) is None
