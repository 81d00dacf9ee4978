"""Checkpoints are of the run that reads them, and a kill leaves no more of them than a save."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records.run_folder import (
    RunFolder,
    RunFolderError,
    load_checkpoint,
    run_identity,
    saved_checkpoints,
)

INFO: dict[str, Any] = {
    "seed": 0,
    "data": {"fingerprint": "abc"},
    "weights": None,
    "config": {"label": "A", "optimization": {"learning_rate": 0.1}, "data": {"fold": 0}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "data": {"data": {"fingerprint": "xyz"}},
    "weights": {"weights": {"sha256": "1"}},
    "data.fold": {"config": INFO["config"] | {"data": {"fold": 1}}},
}


def save(folder: Path, info: dict[str, Any]) -> None:
    about = {"run": run_identity(info)}
    with RunFolder(folder) as run:
        run.save_best(4, {"model": {}, **about})
        run.save(5, {"best": {"step": 4}, **about})


@pytest.mark.parametrize("key", OTHERS)
@pytest.mark.parametrize("kind", ["step", "best"])
def test_a_checkpoint_of_another_run_is_refused(kind, key, tmp_path):
    mine, other, identity = tmp_path / "mine", tmp_path / "other", run_identity(INFO)
    save(mine, INFO)
    save(other, INFO | OTHERS[key])
    assert load_checkpoint(mine, identity)
    for path in (mine / "checkpoints").glob(f"{kind}_*.pt"):
        path.unlink()
    for path in (other / "checkpoints").glob(f"{kind}_*.pt"):
        path.rename(mine / "checkpoints" / path.name)
    with pytest.raises(RunFolderError, match=f"{kind}_0.* is of a run with {key}: "):
        load_checkpoint(mine, identity)


def test_what_is_no_checkpoint_is_named(tmp_path):
    """Also where somebody else made it, with the digest in its name."""
    content = pickle.dumps(tmp_path, protocol=2)  # no tensor
    digest = hashlib.sha256(content).hexdigest()
    folder = tmp_path / "checkpoints"
    (folder / "step_000000008-x.pt").mkdir(parents=True)
    (folder / f"step_000000009-{digest}.pt").write_bytes(content)
    for name, why in (("step_000000009", "UnpicklingError"), ("step_000000008", "IsADirectory")):
        with pytest.raises(RunFolderError, match=rf"{name}-.*missing or damaged \({why}.*delete"):
            load_checkpoint(tmp_path)
        next(folder.glob(f"{name}*")).rename(tmp_path / name)


def test_settings_that_change_no_result_may_differ(tmp_path):
    save(tmp_path, INFO | {"config": INFO["config"] | {"label": "B", "output": "x"}})
    assert load_checkpoint(tmp_path, run_identity(INFO))


def test_a_kill_leaves_no_third_checkpoint(tmp_path, monkeypatch):
    """Neither of steps, nor best weights that no checkpoint names."""
    run = RunFolder(tmp_path)
    with monkeypatch.context() as killed:
        killed.setattr(RunFolder, "remove_old", lambda *_: None)
        for step in (1, 2, 3):
            run.save_best(step, {})
            run.save(step, {"best": {"step": step}})
    assert len(saved_checkpoints(tmp_path)) == 3
    run.remove_old({"step": 3})
    kept = [*saved_checkpoints(tmp_path), *(tmp_path / "checkpoints").glob("best_*")]
    names = [path.name.partition("-")[0] for path in kept]
    assert names == ["step_000000002", "step_000000003", "best_000000003"]
    run.close()
