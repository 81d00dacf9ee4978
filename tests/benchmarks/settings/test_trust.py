"""No code from a file: a named class is imported if its module is trusted, and called if its kind fits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.run import main
from benchmarks.settings.class_paths import DESCRIBED, build, resolved
from benchmarks.settings.errors import ConfigError

HOSTILE = """
from pathlib import Path
from subprocess import Popen

from torch import nn

here = Path(__file__).parent
(here / "imported").touch()


class Harm:
    def __init__(self, *args, **kwargs):
        (here / "called").touch()


class Loss(nn.Module):
    def forward(self, embeddings, labels, *more):
        return embeddings.sum()
"""
HARM = {"class_path": "hostile.Harm"}


def loss(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"losses": [{"loss": {"class_path": class_path, "init_args": arguments}}]}


HORDE = "pml_regularizers.HORDELoss"
PLACES: dict[str, dict[str, Any]] = {
    "loss": loss("hostile.Harm"),
    "argument": loss(HORDE, loss=HARM),
    "argument in text": loss(HORDE, loss="{class_path: hostile.Harm}"),
    "overrides": {"optimization": {"overrides": {"model": {"lr": HARM}}}},
    "trunk's argument": {"model": {"trunk_args": {"act_layer": HARM}}},
}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a module that leaves traces."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    return tmp_path


def config(folder: Path, settings: dict[str, Any]) -> str:
    (folder / "c.yaml").write_text(yaml.safe_dump(settings))
    return f"--config={folder / 'c.yaml'}"


@pytest.mark.parametrize("place", PLACES)
def test_nothing_untrusted_is_imported_or_called(place, hostile, trusting, glyphs_root, refused):
    """Nor is a trusted class of another kind called."""
    words = [config(hostile, PLACES[place]), f"--output={hostile / 'run'}"]
    words.append(f"--data.root={glyphs_root}")
    assert refused(main, *words)
    assert not (hostile / "imported").exists()
    if place != "argument":  # may be any class of a trusted module
        assert refused(main, "--trust=hostile", *words)
    assert not (hostile / "called").exists()


@pytest.mark.parametrize("path", ["torch.save", "benchmarks.run.Path", "hostile.Popen"])
def test_what_belongs_nowhere_is_refused(path, hostile, trusting):
    trusting("hostile")
    for key in (*DESCRIBED, "losses[0].loss", "losses[0].loss.init_args.distance"):
        for act in (build, resolved):
            with pytest.raises(ConfigError, match=r"class_path: expected an? "):
                act({"class_path": path}, key)


def test_what_is_no_path_or_only_begins_like_a_trusted_one(trusting):
    trusting("hos")
    for path in (None, "Identity", "torch..nn"):
        with pytest.raises(ConfigError, match="class_path: expected "):
            build({"class_path": path}, "miner")
    for path in ("hostile.Loss", "torchvision.models.ResNet", "ours.hos.Loss"):
        with pytest.raises(ConfigError, match="add --trust"):
            build({"class_path": path}, "losses[0].loss")


def test_a_run_trusts_the_current_folder(hostile, trusting, glyphs_root, monkeypatch, refused):
    """Also as a program that is started as a file, whose path of modules has its own folder first; and resumes."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(hostile)])
    command = [
        *("--trust=hostile", config(hostile, loss("hostile.Loss"))),
        *(f"--output={hostile / 'run'}", f"--data.root={glyphs_root}", "--data.max_classes=4"),
        *("--data.batch_size=8", "--optimization.steps=2", "--evaluation.every=0"),
        *("--report=false", "--label=x", "--data.num_workers=0"),
    ]
    assert "; expected it in the current folder, or" in refused(main, *command)
    monkeypatch.chdir(hostile)
    assert main(command) == 0
    assert "--trust=hostile" in json.loads((hostile / "run" / "run.json").read_text())["command"]
    trusting()
    assert main([*command, "--resume"]) == 0
