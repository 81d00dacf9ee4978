"""A run folder: the files that a run leaves there, its refusals, and its failures."""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from benchmarks.evaluation import Curves
from benchmarks.records import load_run, write_json
from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.records.steps import read_table
from benchmarks.run import main
from tests.benchmarks.runs import finished, mark_unfinished
from tests.support.processes import TINY

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
        [line] = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        return line

    return said


def test_what_a_finished_run_leaves(
    settings: list[str], done: Path, said: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((done / "run.json").read_text())
    assert record["recipe"] == "glyphs/demo/binomial"
    assert record["config"] == yaml.safe_load((done / "config.yaml").read_text())
    assert record["config"]["optimization"]["steps"] == 6
    assert record["config"]["optimization"]["optimizer"]["init_args"]["eps"] == 1e-8
    command = "ACCELERATE_USE_CPU=true python benchmarks/run.py --data.root="
    assert record["command"].startswith(command)
    assert set(record) >= {"commit", "dirty", "versions", "hardware", "seed", "started", "finished"}
    assert record["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert record["wall_time_s"] > 0
    assert list(record["metrics"]) == [
        *(f"recall_at_{k}" for k in (1, 2, 4, 8)),
        "mean_average_precision_at_r",
        "r_precision",
    ]
    assert 0.05 < record["peak_memory_gib"]["host"] < 50
    assert set(record["files"]) == {
        *("config.yaml", "retrieval.npz", "records/evaluation.csv", "records/training.csv"),
    }
    assert all(load_run(done).file(name).exists() for name in record["files"])
    assert read_table(done / "records", "evaluation")["step"] == [0, 4, 6]
    page = (done / "report.html").read_text()
    assert "<svg" in page
    assert "data:image/png" in page

    # Again: refused without --resume, shown with it; other settings are refused.
    line = said(*settings, f"--output={done}", status=2)
    assert "already holds a run" in line
    before = (done / "run.json").read_text()
    (done / "report.html").unlink()
    assert main([*settings, f"--output={done}", "--resume"]) == 0
    assert (done / "report.html").read_text() == page
    output = capsys.readouterr().out
    assert "is finished" in output
    assert "Recall@1" in output
    assert (done / "run.json").read_text() == before
    line = said(*settings, f"--output={done}", "--resume", "--seed=9", status=2)
    assert "seed" in line
    assert "was started with 0, not 9" in line
    record["config"]["losses"][0]["loss"]["init_args"]["alpha"] = 3.0  # the default of that time
    write_json(done / "run.json", record)
    line = said(*settings, f"--output={done}", "--resume", status=2)
    assert "losses[0].loss.init_args.alpha: " in line
    assert "was started with 3.0, not 2.0" in line
    (done / "run.json").write_text(before)


def test_terms_of_the_loss_and_ratios_are_recorded(settings: list[str], tmp_path: Path) -> None:
    term = "{loss: {class_path: pml_regularizers.BinomialDevianceLoss}, weight: %s}"
    losses = f"[{term % 1.0}, {term % 0.5}]"
    steps = ["--optimization.steps=10", "--diagnose_every=5"]
    finished([*settings, f"--losses={losses}", *steps], tmp_path / "run")
    tables = ("terms", "training", "gradient_ratios")
    terms, whole, ratios = (read_table(tmp_path / "run" / "records", name) for name in tables)
    assert ratios["step"] == [5, 10]
    assert terms.pop("step") == [10]
    [first], [second] = (terms[f"BinomialDevianceLoss{number}"] for number in ("", "_1"))
    assert second == pytest.approx(first / 2)
    assert first + second == pytest.approx(whole["loss"][-1])
    assert not (tmp_path / "run" / "report.html").exists()  # --report=false


def unfinished(done: Path, folder: Path) -> Path:
    """A copy of a finished run, as it was before its end."""
    shutil.copytree(done, folder)
    mark_unfinished(folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def rename(path: Path, state: object) -> None:
    """A checkpoint of something else, whose name bears the SHA-256 of its bytes."""
    torch.save(state, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(path.with_name(f"{path.name[:14]}-{digest}.pt"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def move(path: Path) -> None:
    state = torch.load(path)
    state["run"]["config"]["optimization"]["learning_rate"] = 7.0
    rename(path, state)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (flip, "damaged (its SHA-256 is not the one in its name)"),
    "another setting": (move, "is of a run with optimization.learning_rate: 7.0, expected 0.003"),
    "other shapes": (
        lambda path: rename(path, torch.load(path) | {"model": {}}),
        "does not fit the network",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_checkpoint_is_one_line_and_nothing_is_lost(
    bad: str, settings: list[str], done: Path, said: Callable[..., str], tmp_path: Path
) -> None:
    spoil, expected = BAD[bad]
    folder = unfinished(done, tmp_path / "run")
    [*_, last] = saved_checkpoints(folder)
    spoil(last)
    before = contents(folder)
    line = said(*settings, f"--output={folder}", "--resume", status=2)
    assert f"{folder / 'checkpoints'}" in line
    assert expected in line
    assert "does not fit" in line or "delete it to continue from step_000000003-" in line
    assert contents(folder) == before


SGD = "{class_path: torch.optim.SGD, init_args: {weight_decay: 1e30}}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--optimization.learning_rate=1e30"], ["the loss is nan at step", "images ["]),
        (["--optimization.learning_rate=1e38", "--optimization.steps=1"], ["NaN or inf for"]),
        (
            [
                *(f"--optimization.optimizer={SGD}", "--optimization.learning_rate=1e20"),
                *("--optimization.scheduler=null", "--optimization.steps=1"),
            ],
            ["is not finite after step 1"],
        ),
    ],
    ids=["loss", "embeddings", "weights"],
)
def test_numbers_that_are_not_finite_fail_in_one_line(
    settings: list[str], words: list[str], data: str, said: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    line = said(data, *TINY, *settings, "--report=false", f"--output={folder}", status=1)
    assert all(word in line for word in words)
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["diverged"]) == ("failed", True)
    assert f"error: {record['error']}" == line
    assert not saved_checkpoints(folder) or "NaN or inf for" in line


def test_a_full_disk_is_one_line(
    settings: list[str],
    said: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert line == (
        f"error: {folder}: No space left on device; repair that, and rerun the same command with --resume"
    )
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "failed"
    assert not list(folder.rglob("*.tmp"))
    assert read_table(folder / "records", "training")["step"] == [1, 2, 3]
    assert finished([*settings, "--resume"], folder)["error"] is None


def test_a_replaced_image_is_not_trained_on(
    said: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a format whose files have one size, too; a copy of the folder is the same images."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    images, other = tmp_path / "images", Image.new("RGB", (24, 24), "red")
    for name in range(4):
        (images / f"class{name}").mkdir(parents=True)
        for i in range(4):
            Image.effect_noise((24, 24), 50).convert("RGB").save(
                images / f"class{name}" / f"{i}.bmp"
            )
    settings = [*SHORT, "--data.dataset=folder", "--data.image_size=32", "--data.num_workers=0"]
    settings += ["--data.batch_size=4", "--data.samples_per_class=2"]
    finished([f"--data.root={images}", *settings], tmp_path / "run")
    mark_unfinished(tmp_path / "run")
    copy = shutil.copytree(images, tmp_path / "copy")
    size = (copy / "class0" / "0.bmp").stat().st_size
    other.save(copy / "class0" / "0.bmp")
    assert (copy / "class0" / "0.bmp").stat().st_size == size
    again = [*settings, f"--output={tmp_path / 'run'}", "--resume", "--report=false"]
    line = said(f"--data.root={copy}", *again, status=2)
    assert line.startswith("error: data.root: an image is not the one")
    shutil.copy(images / "class0" / "0.bmp", copy / "class0" / "0.bmp")
    assert main([f"--data.root={copy}", *again]) == 0


def test_a_folder_with_other_files_is_left_alone(
    data: str, said: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    line = said(data, *TINY, f"--output={tmp_path}", status=2)
    assert "holds files but no run.json" in line
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_run_killed_before_its_first_record_can_be_started_again(
    data: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / ".lock").touch()
    left = [folder / ".run.json.tmp", folder / "checkpoints" / "step_000000009.tmp"]
    for path in left:
        path.write_text("{")
    record = finished([data, *TINY, "--optimization.steps=1", "--resume"], folder)
    assert record["status"] == "finished"
    assert not any(path.exists() for path in left)


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*settings, "--checkpoint_every=6", "--evaluation.every=2"]
    point = Curves.point
    with monkeypatch.context() as patch:
        patch.setattr(Curves, "point", lambda self, step: 1 / 0 if step else point(self, step))
        with pytest.raises(ZeroDivisionError):
            finished(settings, tmp_path / "run")
    assert read_table(tmp_path / "run" / "records", "evaluation")["step"] == [0]
    finished([*settings, "--resume"], tmp_path / "run")
    assert read_table(tmp_path / "run" / "records", "evaluation")["step"] == [0, 2, 4, 6]
