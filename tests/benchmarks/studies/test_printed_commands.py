"""Commands that are printed can be pasted into a shell: they are whole, and quoted."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import study
from benchmarks.records.provenance import describe_session
from benchmarks.records.results import load_run
from tests.benchmarks.studies.toy import RATE, finish


@pytest.fixture
def pasted(tmp_path_factory, monkeypatch):
    """The words that `python` gets of a command that bash reads."""
    python = tmp_path_factory.mktemp("bin") / "python"
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    return lambda command: json.loads(subprocess.check_output(["bash", "-c", command]))


def test_a_study_of_ones_own_file_prints_commands_that_run(toy, trained_by, pasted, capsys):
    place = Path("my studies; & 'more'")
    place.mkdir()
    own = Path("toy.yaml").rename(place / "small.yaml")
    arguments = [str(own), "--data.root", "my photos", "--", f"--{RATE}=0.5", "--trust", "decimal"]
    queues = trained_by(lambda job: finish(job, 0.5 + job.seed / 10))
    assert study.main(arguments) == 0
    page = Path("runs/studies/small/study.md").read_text()
    words = pasted(re.search(r"by `(python -m benchmarks\.study .*?)`", page)[1])
    assert words == ["-m", "benchmarks.study", *arguments]
    capsys.readouterr()
    assert study.main(words[2:]) == 0 and len(queues) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "benchmarks.export" in line]
    words = pasted(line.partition(": ")[2])
    assert words[:2] == ["-m", "benchmarks.export"] and words[-2:] == ["--trust", "decimal"]
    assert load_run(Path(words[2])).info["status"] == "finished"


def test_two_files_of_one_name_do_not_share_a_folder(toy, trained_by, refused):
    for place in ("a", "b"):
        Path(place).mkdir()
        Path(place, "small.yaml").write_text(Path("toy.yaml").read_text())
    queues = trained_by(lambda job: finish(job, 0.5))
    assert study.main(["a/small.yaml"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    line = refused(study.main, "b/small.yaml")
    assert "--runs: runs/studies/small holds the runs of " in line and "a/small.yaml" in line
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before
    assert study.main(["b/small.yaml", "--runs=runs/b", "--output=b.md"]) == 0
    Path("a").rename("moved")  # the study goes on
    assert study.main(["moved/small.yaml"]) == 0 and len(queues) == 2


def test_the_command_that_a_run_records_can_be_pasted(pasted, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = ["--label=a 'b'; c", "--losses=[{loss: {class_path: a.B}}]", "--data.root=my d"]
    command = describe_session(arguments, 1)["command"]
    assert pasted(command) == ["benchmarks/run.py", *arguments]
