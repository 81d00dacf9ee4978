"""Runs that fail in the middle: one line, no process is left, and the last checkpoint goes on."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from pytorch_metric_learning.losses import ContrastiveLoss

from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.records.steps import read_table
from tests.support.processes import TIMEOUT, rows, start

HERE = "tests.end_to_end.test_failures"
STEPS = 150


class FailingLoss(ContrastiveLoss):  # type: ignore[misc]  # PML has no types
    """Raises an error in its tenth call, as long as a file is there."""

    def __init__(self, file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.file, self.calls = file, 0

    def forward(self, *arguments: Any, **others: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 10 and Path(self.file).exists():
            raise LookupError("the tenth call\nis one too many")
        found: torch.Tensor = super().forward(*arguments, **others)
        return found


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A folder of images, read by two workers."""
    for number in range(16):
        path = tmp_path / "images" / f"class{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return [
        "--data.dataset=folder",
        *(f"--data.root={tmp_path / 'images'}", "--data.image_size=32", "--data.num_workers=2"),
        *("--data.batch_size=4", "--data.samples_per_class=2", "--evaluation.every=0"),
        *(f"--optimization.steps={STEPS}", "--checkpoint_every=4", "--report=false"),
        f"--output={tmp_path / 'run'}",
    ]


def fails(settings: list[str], folder: Path, while_it_runs: Any = None) -> str:
    """The one line of a run that fails; nothing of its processes is left."""
    process = start(settings, start_new_session=True)
    if while_it_runs is not None:
        deadline = time.monotonic() + TIMEOUT
        while rows(folder) < 8:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        while_it_runs()
    children = psutil.Process(process.pid).children(recursive=True)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert not [child for child in children if child.is_running()]
    lines = re.findall(r"error: .*", output)
    assert len(lines) == 1
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["diverged"]) == ("failed", False)
    assert f"error: {record['error']}" == lines[0]
    assert saved_checkpoints(folder)
    return lines[0]


def goes_on(settings: list[str], folder: Path) -> dict[str, Any]:
    process = start([*settings, "--resume"])
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert read_table(folder / "records", "training")["step"] == list(range(1, STEPS + 1))
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["error"], record["traceback"]) == ("finished", None, None)
    assert record["sessions"][1]["from_step"] >= 4
    return record


@pytest.mark.slow
def test_an_image_that_is_damaged_during_the_training(settings: list[str], tmp_path: Path) -> None:
    images = sorted((tmp_path / "images").rglob("*.png"))
    before = {path: path.read_bytes() for path in images}

    def damage() -> None:
        for path in images:
            path.write_bytes(before[path][:200])

    line = fails(settings, tmp_path / "run", damage)
    assert re.match(rf"error: {tmp_path}/images/class\d/\d+\.png: cannot be read", line)
    assert "python -m benchmarks.datasets verify folder --data.root" in line
    for path, content in before.items():
        path.write_bytes(content)
    goes_on(settings, tmp_path / "run")


@pytest.mark.slow
def test_a_loss_that_raises_during_the_training(settings: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "switch").touch()
    described = f"{{class_path: {HERE}.FailingLoss, init_args: {{file: {file}}}}}"
    settings = [*settings, f"--losses=[{{loss: {described}}}]", f"--trust={HERE}"]
    line = fails(settings, tmp_path / "run")
    assert line.startswith(
        "error: step 10 failed: LookupError: the tenth call is one too many; "
        f"{tmp_path / 'run'}/run.json has the traceback; "
    )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "raise LookupError" in record["traceback"]
    file.unlink()
    assert goes_on(settings, tmp_path / "run")["sessions"][1]["from_step"] == 8
