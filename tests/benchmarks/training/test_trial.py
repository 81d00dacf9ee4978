"""The parts of a run and its trial step."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from benchmarks.settings import parse
from benchmarks.training import trial
from tests.support.processes import TINY, horde

MEMORY = (
    "--losses=[{loss: {class_path: pytorch_metric_learning.losses.CrossBatchMemory, init_args: {memory_size: 9, "
    "loss: {class_path: pytorch_metric_learning.losses.ContrastiveLoss}}}}]"
)


@pytest.mark.parametrize("setting", [horde(), MEMORY])
def test_the_trial_step_leaves_no_trace(
    setting: str, glyphs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = parse([f"--data.root={glyphs_root}", *TINY, setting]).experiment
    found = {}
    for name in ("tried", "untried"):
        if name == "untried":
            monkeypatch.setattr(
                trial, "try_one_step", lambda of, accelerator: trial.build_model(of.model, of.data)
            )
        model, _, loss, _ = trial.build_parts(experiment, Accelerator(cpu=True))
        weights = {**model.state_dict(), **loss.state_dict(prefix="loss.")}
        hooks = len(model.head.feature_map._forward_hooks)
        found[name] = weights, torch.get_rng_state(), hooks
        assert all(p.grad is None for p in model.parameters())
        assert model.training
    tried, untried = found.values()
    assert tried[0].keys() == untried[0].keys()
    for name, tensor in untried[0].items():
        assert torch.equal(tried[0][name], tensor), name
    assert torch.equal(tried[1], untried[1])
    assert tried[2] == untried[2]
