"""The folder of one run: its lock, and its checkpoints, which are complete or absent.

The name of a checkpoint ends with the SHA-256 of its bytes, and the checkpoint names its run. It is used only if
both are right.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.console.printing import PrintableError
from benchmarks.console.writing import OwnedFolder, replacing
from benchmarks.records.files import file_digest
from benchmarks.settings.differences import Change, changes_of_results, config_changes

EMBEDDINGS = "test_embeddings.npz"

NEIGHBOURS = "neighbours.npz"  # of some queries, for the report

HEAD = "head.npz"  # the layer of a network that was trained without one
KEPT = 2  # checkpoints


class RunFolderError(PrintableError, RuntimeError):
    """Error: the run folder cannot be used; one line with the reason and the remedy."""


class RunFolder(OwnedFolder):
    """The folder of a run, owned by this process; incomplete files of killed processes are removed."""

    def __init__(self, path: Path) -> None:
        self.checkpoints = path / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        for place in (path, self.checkpoints, path / "records"):
            for left in place.glob("*.tmp"):  # by processes that were killed
                left.unlink()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; the last two are kept, and of the best weights those that this one names."""
        _write(self.checkpoints, f"step_{step:09d}", {"step": step, **state})
        self.remove_old(state.get("best"))

    def remove_old(self, best: Mapping[str, Any] | None) -> None:
        """Remove what `save` does not keep: a process that is killed before that leaves more."""
        for old in saved_checkpoints(self.path)[:-KEPT]:
            old.unlink()
        kept = best and _best(self.path, best["step"])
        for path in self.checkpoints.glob("best_*.pt"):
            if path != kept:
                path.unlink()

    def save_best(self, step: int, state: dict[str, Any]) -> None:
        """Write the best weights so far, beside those of earlier steps."""
        _write(self.checkpoints, f"best_{step:09d}", {"step": step, **state})


def check_same(changes: Iterable[Change], folder: Path) -> None:
    """Raise a RunFolderError for the first change since a folder was started."""
    for change in changes:
        raise RunFolderError(
            f"{change.key}: {folder} was started with {change.before!r}, not {change.now!r}; resume with the same "
            "settings and files, or choose another folder"
        )


def saved_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step_*-*.pt"))


def _best(run: Path, step: int) -> Path:
    """The file of the best weights, of this step; it may be missing."""
    folder, name = run / "checkpoints", f"best_{step:09d}"
    return next(folder.glob(f"{name}-*.pt"), folder / f"{name}.pt")


def run_identity(info: Mapping[str, Any]) -> dict[str, Any]:
    """Seed, images, file of weights and settings in a run.json: the checkpoints of the run must agree in them."""
    return {
        "seed": info["seed"],
        "data": info["data"]["fingerprint"],
        "content": info["data"].get("content"),
        "weights": info["weights"] and info["weights"]["sha256"],
        "config": info["config"],
    }


def load_checkpoint(
    run: Path, identity: dict[str, Any] | None = None, remedy: str | None = None
) -> dict[str, Any] | None:
    """The last checkpoint of a run, on the CPU; None if there is none.

    Args:
        identity: Of the run that it must be of, except for settings that cannot change the result.
        remedy: What to do with a damaged one; default: go on from the one before, or anew.

    Raises:
        RunFolderError: if it, or the best weights that it names, are damaged, or if it is of another run.
    """
    paths = saved_checkpoints(run)
    if not paths:
        return None
    older = f"delete it to continue from {paths[-2].name}, or " if paths[1:] else ""
    remedy = remedy or f"{older}delete {run / 'checkpoints'} to start again from the first step"
    state = _read(paths[-1], identity, remedy)
    best = state.get("best")
    if identity is not None and best and _best(run, best["step"]).exists():
        load_best(run, best["step"], identity, remedy)
    return state


def load_best(
    run: Path, step: int, identity: dict[str, Any], remedy: str = "run that training again"
) -> dict[str, Any]:
    """Load the weights that validation classes chose, on the CPU; raises as `load_checkpoint` does."""
    return _read(_best(run, step), identity, remedy)


def run_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], *, recorded: bool = False
) -> list[Change]:
    """The differences between two runs' identities that can change the result; with `recorded`, all of them.

    What one of them does not have is not compared: a job has no images yet, and older code recorded no content.
    """
    keys = [key for key in ("seed", "data", "content", "weights") if key in before and key in now]
    known = [key for key in keys if key != "content" or None not in (before[key], now[key])]
    changes = [Change(key, before[key], now[key]) for key in known if before[key] != now[key]]
    compared = config_changes if recorded else changes_of_results
    return [*changes, *compared(before["config"], now["config"])]


def _write(folder: Path, stem: str, state: dict[str, Any]) -> None:
    import torch

    temporary = folder / f"{stem}.tmp"
    with replacing(temporary) as file:
        torch.save(state, file)
    digest = file_digest(temporary)
    for old in folder.glob(f"{stem}*.pt"):
        old.unlink()
    temporary.replace(folder / f"{stem}-{digest}.pt")


def _read(path: Path, identity: dict[str, Any] | None, remedy: str) -> dict[str, Any]:
    """Load a checkpoint, which must have the SHA-256 of its name and be of this run."""
    import torch

    try:
        if path.stem.rpartition("-")[2] != file_digest(path):
            raise ValueError("its SHA-256 is not the one in its name")
        state: dict[str, Any] = dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # of a file by somebody else, too
        why = f"{error}" if type(error) is ValueError else type(error).__name__
        raise RunFolderError(f"{path}: missing or damaged ({why}); {remedy}") from error
    if identity is not None and "run" in state:  # in the best weights, older code did not write it
        for change in run_changes(state["run"], identity):
            raise RunFolderError(
                f"{path}: is of a run with {change.key}: {change.before!r}, expected {change.now!r}; {remedy}"
            )
    return state
