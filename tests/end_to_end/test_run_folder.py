"""A run folder: the files that a run leaves there, its refusals, and its failures."""

import errno
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import yaml

from benchmarks import report
from benchmarks.records.files import write_json
from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.records.steps import read_table
from benchmarks.records.trackers import PROJECT
from benchmarks.run import main
from benchmarks.training import run as training_run
from benchmarks.training.loop import Trainer
from tests.benchmarks.runs import finished, mark_unfinished, record_of
from tests.support.fake_trees import write_pictures
from tests.support.processes import TIMEOUT, TINY, run, start, wait_for_rows

SHORT = (*TINY, "--optimization.steps=6", "--checkpoint_every=3", "--evaluation.every=4")
SHORT += ("--data.batch_size=20",)


@pytest.fixture(scope="session")
def settings(data: str) -> list[str]:
    return [data, *SHORT, "--evaluation.curve_classes=10"]


@pytest.fixture(scope="module")
def done(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with its report."""
    folder = tmp_path_factory.mktemp("done") / "run"
    assert main([*settings, f"--output={folder}"]) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line that a run ends with, and its exit status."""

    def said(*arguments: str, status: int) -> str:
        assert main(arguments) == status
        lines = capsys.readouterr().err.splitlines()
        [line] = [line for line in lines if line.startswith("error: ")]
        return line

    return said


def test_what_a_finished_run_leaves(settings, done, said, capsys, monkeypatch):
    record = record_of(done)
    assert record["recipe"] == "glyphs/demo/binomial"
    assert record["config"] == yaml.safe_load((done / "config.yaml").read_text())
    assert record["config"]["optimization"]["optimizer"]["init_args"]["eps"] == 1e-8
    command = "ACCELERATE_USE_CPU=true python benchmarks/run.py --data.root="
    assert record["command"].startswith(command)
    assert record["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"recall_at_1", "mean_average_precision_at_r", "r_precision"} <= {*record["metrics"]}
    tables = {"records/evaluation.csv", "records/training.csv"}
    assert set(record["files"]) == {"config.yaml", "neighbours.npz", *tables}
    assert read_table(done / "records", "evaluation")["step"] == [0, 4, 6]
    page = (done / "report.html").read_text()
    assert "data:image/svg" in page and "data:image/png" in page
    drawn = done.parent / "again.html"  # from the images that the settings name
    assert report.main([str(done), f"--output={drawn}"]) == 0 and drawn.read_text() == page

    # Again, nothing is built: refused without --resume, shown with it; other settings are refused.
    monkeypatch.delattr(training_run, "build_parts")
    assert "already holds a run" in said(*settings, f"--output={done}", status=2)
    before = (done / "run.json").read_text()
    (done / "report.html").unlink()
    resumed = [*settings, f"--output={done}", "--resume"]
    assert main(resumed) == 0
    assert (done / "report.html").read_text() == page
    assert "is finished" in capsys.readouterr().out
    assert (done / "run.json").read_text() == before
    assert "was started with 0, not 9" in said(*resumed, "--seed=9", status=2)
    record["config"]["losses"][0]["loss"]["init_args"]["alpha"] = 3.0  # the default of that time
    write_json(done / "run.json", record)
    line = said(*resumed, status=2)
    assert "losses[0].loss.init_args.alpha: " in line and "was started with 3.0, not 2.0" in line
    (done / "run.json").write_text(before)


def contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    """No network; the name bears the SHA-256 of the bytes."""
    torch.save(torch.load(path) | {"model": {}}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(path.with_name(f"{path.name[:14]}-{digest}.pt"))


@pytest.mark.parametrize(
    ("spoil", "expected"), [(flip, r"damaged .*step_000000003-"), (empty, "does not fit")]
)
def test_nothing_is_lost_of_a_bad_checkpoint(spoil, expected, settings, done, said, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    mark_unfinished(folder)
    spoil(saved_checkpoints(folder)[-1])
    before = contents(folder)
    line = said(*settings, f"--output={folder}", "--resume", status=2)
    assert f"{folder / 'checkpoints'}" in line and re.search(expected, line)
    assert contents(folder) == before


SGD = "optimizer: {class_path: torch.optim.SGD, init_args: {weight_decay: 1e30}}, scheduler: null"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("learning_rate: 1e30, steps: 2", "the loss is nan at step"),
        ("learning_rate: 1e38, steps: 1", "NaN or inf for"),
        (f"learning_rate: 1e20, steps: 1, {SGD}", "is not finite after step 1"),
    ],
    ids=["loss", "embeddings", "weights"],
)
def test_numbers_that_are_not_finite_fail_in_one_line(settings, words, data, said, tmp_path):
    folder, settings = tmp_path / "run", f"--optimization={{{settings}}}"
    line = said(data, *TINY, settings, "--report=false", f"--output={folder}", status=1)
    assert words in line
    record = record_of(folder)
    assert (record["status"], record["diverged"]) == ("failed", True)
    assert f"error: {record['error']}" == line
    assert not saved_checkpoints(folder) or "NaN or inf for" in line


def test_a_full_disk_is_one_line(settings, said, tmp_path, monkeypatch):
    """torch.save puts errors of its own on top of it."""
    folder = tmp_path / "run"

    def fails(state: object, file: Any) -> None:
        file.write(b"some")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fails)
        line = said(*settings, "--report=false", f"--output={folder}", status=1)
    assert line.startswith(f"error: {folder}: No space left on device")
    record = record_of(folder)
    assert record["status"] == "failed"
    assert not list(folder.rglob("*.tmp"))
    assert read_table(folder / "records", "training")["step"] == [1, 2, 3]
    assert finished([*settings, "--resume"], folder)["error"] is None


def test_the_traceback_of_an_error_in_a_step_is_kept(settings, said, tmp_path, monkeypatch):
    error = LookupError("one\nis too many")
    monkeypatch.setattr(Trainer, "_step", mock.Mock(side_effect=error))
    folder = tmp_path / "run"
    line = said(*settings, "--report=false", f"--output={folder}", status=1)
    assert line.startswith("error: step 1 failed: LookupError: one is too many")
    assert f"{folder}/run.json" in line
    record = record_of(folder)
    assert record["diverged"] is False and "LookupError: one\n" in record["traceback"]


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    names = [f"{name}/{i}.jpg" for name in "abcd" for i in range(4)]
    write_pictures(tmp_path / "images", names, different=16)
    return tmp_path / "images"


OF_PHOTOGRAPHS = ("--data.dataset=folder", "--data.image_size=32", "--data.batch_size=4")
OF_PHOTOGRAPHS += ("--data.samples_per_class=2", "--report=false")


@pytest.mark.slow
def test_an_image_that_is_damaged_during_a_run(photographs, tmp_path):
    """One line, and no process is left; once the images are whole, the last checkpoint goes on."""
    folder = tmp_path / "run"
    settings = [f"--data.root={photographs}", *OF_PHOTOGRAPHS, "--data.num_workers=2"]
    settings += ["--optimization.steps=150", "--checkpoint_every=4", "--evaluation.every=0"]
    settings += [f"--output={folder}"]
    process = start(settings, start_new_session=True)
    wait_for_rows(process, folder, 8)
    images = {path: path.read_bytes() for path in photographs.rglob("*.jpg")}
    for path, content in images.items():
        path.write_bytes(content[:200])
    children = psutil.Process(process.pid).children(recursive=True)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert not [child for child in children if child.is_running()]
    [line] = re.findall(r"error: (.*)", output)
    assert re.match(rf"{photographs}/\w/\d\.jpg: cannot be read", line)
    record = record_of(folder)
    assert (record["status"], record["diverged"], record["error"]) == ("failed", False, line)

    for path, content in images.items():
        path.write_bytes(content)
    run([*settings, "--resume"])
    assert read_table(folder / "records", "training")["step"] == list(range(1, 151))
    record = record_of(folder)
    assert (record["status"], record["error"], record["traceback"]) == ("finished", None, None)
    assert record["sessions"][1]["from_step"] >= 4


def test_a_replaced_image_is_not_trained_on(photographs, said, tmp_path):
    """Of the same size, too; a copy of the folder is the same images."""
    settings = [*SHORT, *OF_PHOTOGRAPHS, "--data.num_workers=0"]
    finished([f"--data.root={photographs}", *settings], tmp_path / "run")
    mark_unfinished(tmp_path / "run")
    copy = shutil.copytree(photographs, tmp_path / "copy")
    again = [f"--data.root={copy}", *settings, f"--output={tmp_path / 'run'}", "--resume"]
    image = copy / "a" / "0.jpg"
    whole = image.read_bytes()
    image.write_bytes(whole[:25] + bytes([whole[25] ^ 1]) + whole[26:])  # of the quantisation
    line = said(*again, status=2)
    assert line.startswith("error: data.root: ")
    image.write_bytes(whole)
    assert main(again) == 0


def test_a_run_does_not_write_among_its_images(photographs, said):
    """The next one would take its folders for classes without images, to be removed."""
    place = photographs / "runs" / "x"
    settings = [f"--data.root={photographs}", *SHORT, *OF_PHOTOGRAPHS, f"--output={place}"]
    assert said(*settings, status=2).startswith(f"error: output: {place} lies in data.root")
    assert not place.parent.exists()


def test_a_folder_with_other_files_is_left_alone(data, said, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / ".lock").touch()
    line = said(data, *TINY, f"--output={tmp_path}", status=2)
    assert line.startswith(f"error: output: {tmp_path} ") and "run.json" in line
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "config.yaml"}
    (tmp_path / "config.yaml").unlink()
    (tmp_path / PROJECT).mkdir()
    (tmp_path / PROJECT / "events.out.tfevents.0").touch()  # of a tracker, before a kill
    finished([data, *SHORT], tmp_path)
