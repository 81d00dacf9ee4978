"""Runs that fail in the middle: one line, no process is left, and the last checkpoint goes on."""

import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.records.steps import read_table
from tests.support.fake_trees import write_pictures
from tests.support.processes import TIMEOUT, run, start, wait_for_rows

HERE = "tests.end_to_end.test_failures"
STEPS = 150


class FailingLoss(ContrastiveLoss):  # type: ignore[misc]  # PML has no types
    """Raises an error in its tenth call, where the environment asks for it."""

    calls = 0

    def forward(self, *arguments: Any, **others: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 10 and "FAIL" in os.environ:
            raise LookupError("the tenth call\nis one too many")
        found: torch.Tensor = super().forward(*arguments, **others)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("damage", [True, False], ids=["a damaged image", "a loss that raises"])
def test_a_failure_in_the_middle(
    damage: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    names = [f"{name}/{number}.jpg" for name in "abcd" for number in range(4)]
    write_pictures(tmp_path / "images", names, different=16)
    settings = [
        *("--data.dataset=folder", f"--data.root={tmp_path / 'images'}", "--data.image_size=32"),
        *("--data.num_workers=2", "--data.batch_size=4", "--data.samples_per_class=2"),
        *(f"--optimization.steps={STEPS}", "--checkpoint_every=4", "--evaluation.every=0"),
        *("--report=false", f"--output={folder}"),
    ]
    images = {path: path.read_bytes() for path in (tmp_path / "images").rglob("*.jpg")}
    if damage:
        said = (
            rf"{tmp_path}/images/\w/\d\.jpg: cannot be read.* -m benchmarks.datasets verify folder"
        )
    else:
        said = f"step 10 failed: LookupError: the tenth call is one too many; {folder}/run.json has"
        settings += [f"--losses=[{{loss: {{class_path: {HERE}.FailingLoss}}}}]", f"--trust={HERE}"]
        monkeypatch.setenv("FAIL", "1")

    process = start(settings, start_new_session=True)
    if damage:
        wait_for_rows(process, folder, 8)
        for path, content in images.items():
            path.write_bytes(content[:200])
    children = psutil.Process(process.pid).children(recursive=True)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert not [child for child in children if child.is_running()]
    [line] = re.findall(r"error: (.*)", output)
    assert re.match(said, line)
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["diverged"], record["error"]) == ("failed", False, line)
    assert damage or "raise LookupError" in record["traceback"]
    assert saved_checkpoints(folder)

    for path, content in images.items():
        path.write_bytes(content)
    monkeypatch.delenv("FAIL", raising=False)
    run([*settings, "--resume"])
    assert read_table(folder / "records", "training")["step"] == list(range(1, STEPS + 1))
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["error"], record["traceback"]) == ("finished", None, None)
    assert record["sessions"][1]["from_step"] >= 4
