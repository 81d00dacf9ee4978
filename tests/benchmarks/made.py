"""Records of runs that nobody has trained, and recipes of a paper that nobody has written."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.records.files import write_json
from benchmarks.settings import recipe_files

RECORD: dict[str, Any] = {
    **{"label": "", "seed": 0, "status": "finished", "steps": 30, "config": {}},
    "protocol": "paper",
    **{"metrics": {"recall_at_1": 0.5}, "outputs": {}, "weights": None},
    "data": {
        **{"name": "glyphs", "split": "test", "fingerprint": "abc"},
        **{"test_classes": 5, "test_images": 60},
    },
    **{"commit": "0123abcd", "dirty": False, "finished": "2026-01-01"},
    **{"wall_time_s": 1.0, "hardware": {}, "world_size": 1},
}

DIVERGED = {"status": "failed", "diverged": True, "error": "the loss is nan", "metrics": {}}


LOSSES = [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]


def use_recipes(folder: Path, patch: pytest.MonkeyPatch, tables: dict[str, Any]) -> None:
    """Let these tables of recipes, by PAPER/TABLE, be all that there are."""
    for name, content in tables.items():
        file = folder / "recipes" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(content, sort_keys=False))
    patch.setattr(recipe_files, "RECIPES", folder / "recipes")


def write_record(folder: Path, **changes: Any) -> Path:
    """Make a run folder; `changes` replace entries of its run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    record = RECORD | changes
    if record["status"] == "failed":
        del record["outputs"]  # it has tested nothing
    write_json(folder / "run.json", record)
    return folder
