"""A run on a device without float64."""

import pytest
import torch
from accelerate.state import PartialState

from benchmarks.run import main
from tests.support.apple import APPLE, Apple
from tests.support.processes import NO_BATCH_STATISTICS, TINY, horde


@pytest.mark.slow
def test_a_run_on_a_device_without_float64(glyphs_root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PartialState, "default_device", APPLE)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: None)
    settings = [f"--data.root={glyphs_root}", *TINY, horde(), "--optimization.steps=2"]
    settings += [*NO_BATCH_STATISTICS, "--diagnose_every=2", f"--output={tmp_path / 'run'}"]
    with Apple():
        assert main([*settings, "--precision=float64"]) == 2
        assert "error: precision: mps has no float64; set ACCEL" in capsys.readouterr().err
        assert main(settings) == 0
    assert (tmp_path / "run" / "run.json").exists()
