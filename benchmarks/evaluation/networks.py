"""Networks as they were left: in the folder of a run, or of an export."""

from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_model_data_config
from torch import nn

from benchmarks.backbones import register
from benchmarks.building.network import STARTING_WEIGHTS, EmbeddingModel, build_model
from benchmarks.console.printing import reason
from benchmarks.evaluation.closed_form import load_head
from benchmarks.records.files import damage_named
from benchmarks.records.results import Run, load_run
from benchmarks.records.run_folder import (
    HEAD,
    RunFolderError,
    load_best,
    load_checkpoint,
    run_identity,
)
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment


@dataclass(frozen=True)
class RunNetwork:
    """The network of a run folder."""

    run: Run
    experiment: Experiment  # without the weights that the run began with
    step: int  # of the checkpoint
    network: EmbeddingModel  # in evaluation mode, on the CPU, in float64 if the run was


def load_network(folder: Path) -> RunNetwork:
    """Load the network that a run has tested, or that of its last checkpoint so far; no other files are read.

    Raises:
        ConfigError: if the folder has no such checkpoint, or not the layer that the test makes.
    """
    try:
        run = load_run(folder)
        ended = run.info["status"] == "finished"  # and --resume does nothing
        again = "put it back, or run that training again" if ended else None
        state = load_checkpoint(folder, run_identity(run.info), again)
        settings = run.file("config.yaml")
        if run.info.get("selection"):  # the weights that validation classes chose were tested
            state = load_best(folder, run.info["selection"]["step"], run_identity(run.info))
    except (ValueError, RunFolderError) as error:
        raise ConfigError(str(error)) from error
    if state is None:
        lost = "is finished and has no checkpoint any more; run that training again"
        told = lost if ended else "has no checkpoint yet; go on with the run by --resume"
        raise ConfigError(f"{folder}: {told}")
    try:
        # The current contents of a folder of weights do not matter.
        experiment = parse([f"--config={settings}", "--model.weights=null"]).experiment
        for name in STARTING_WEIGHTS:
            experiment.model.trunk_args.pop(name, None)
        network = build_model(experiment.model, experiment.data).eval()
        if experiment.precision == "float64":
            network.double()
        network.load_state_dict(state["model"])
    except ConfigError as error:
        raise ConfigError(f"{settings}: {error}") from error
    except RuntimeError as error:
        line = f"{settings}: describes another network than the checkpoint holds"
        raise ConfigError(f"{line} ({reason(error)}); put the run's own back") from error
    if kind := experiment.model.replacement:
        network.head.fc = _layer_of_test(run, kind).to(next(network.parameters()).dtype)
    return RunNetwork(run, experiment, state["step"], network)


def _layer_of_test(run: Run, kind: str) -> nn.Linear:
    """The layer that a run's test has made; a ConfigError if it is not there."""
    if run.info["status"] != "finished":  # one that is there may belong to other weights
        raise ConfigError(
            f"{run.folder}: has no embedding layer yet, which its test makes of {kind}; go on with the run by "
            "--resume"
        )
    try:
        path, remedy = run.file(HEAD), "put it back, or run that training again"
        if not path.exists():
            raise ValueError(f"{path}: is missing; {remedy}")
        with damage_named(path, remedy):
            return load_head(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_export(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load timm's model of an export, in evaluation mode, and the settings of `data` for its test view.

    Raises:
        ConfigError: if timm cannot load it.
    """
    register()
    try:
        network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:  # timm's files make almost any
        raise ConfigError(
            f"{folder}: timm cannot load it ({reason(error)}); export it again"
        ) from error
    view = resolve_model_data_config(network)
    channels, size, _ = view["input_size"]
    if channels == 1:  # Glyphs, which have no other view
        return network, {"image_size": size}
    return network, {
        "image_size": size,
        "resize": floor(size / view["crop_pct"]),
        "keep_aspect": view["crop_mode"] != "squash",
        "interpolation": view["interpolation"],
    }
