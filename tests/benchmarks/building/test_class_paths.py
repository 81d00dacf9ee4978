"""Descriptions of classes with all their defaults: their contents, and that they build the same objects."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_metric_learning import losses
from torch import nn

from benchmarks.building.class_paths import DESCRIBED, build, resolved
from benchmarks.run import main
from benchmarks.settings import read_entry, recipe_names
from benchmarks.settings.command import parse
from benchmarks.training.trial import try_one_step
from pml_regularizers import JRDLoss, JRSRegularizer

PML = "pytorch_metric_learning"
SIZES = {"num_classes": 3, "in_channels": 8, "embedding_size": 8}
MADE = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
MINER = f"--miner={{class_path: {PML}.miners.DistanceWeightedMiner}}"


def arguments(description: dict[str, Any], key: str = "losses.x") -> dict[str, Any]:
    """Arguments in the resolved settings for a description without its defaults."""
    return dict(resolved(description, key)["init_args"])


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*options, "--print_config"]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


# --------------------------------------------------------------------------------------- what is said


def test_every_default_is_printed_and_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = printed(capsys, "--recipe=glyphs/demo/binomial_horde", MINER)
    horde = config["losses"][0]["loss"]["init_args"]
    assert {"projections", "init", "normalize", "checkpoint"} <= horde.keys()
    assert not SIZES.keys() & horde.keys()
    inner = horde["loss"]["init_args"]
    assert (inner["alpha"], inner["beta"], inner["embedding_reg_weight"]) == (2.0, 0.5, 1)
    assert inner["reducer"]["class_path"].endswith(".SumReducer")
    assert config["miner"]["init_args"]["cutoff"] == 0.5
    assert config["miner"]["init_args"]["distance"]["init_args"]["p"] == 2
    optimizer = config["optimization"]["optimizer"]["init_args"]
    assert (optimizer["betas"], optimizer["eps"]) == ([0.9, 0.999], 1e-8)
    assert not {"params", "lr"} & optimizer.keys()
    assert config["optimization"]["scheduler"]["init_args"]["pct_start"] == 0.3
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert printed(capsys, f"--config={path}") == config


class Odd:
    """An argument without a default, two with one that YAML cannot hold, and a tuple."""

    def __init__(  # type: ignore[no-untyped-def]
        self, needed, act=torch.relu, dtype: torch.dtype = torch.float32, sizes=(1, 2)
    ) -> None:
        self.made_of = needed, act, dtype, sizes


def test_what_yaml_cannot_hold_is_left_out(trusting: Callable[..., None]) -> None:
    trusting(__name__)
    odd = {"class_path": f"{__name__}.Odd"}
    assert arguments(odd) == {"sizes": [1, 2]}
    odd["init_args"] = {"needed": None}  # type: ignore[assignment]
    full = arguments(odd)
    assert full == {"needed": None, "sizes": [1, 2]}
    again = build({**odd, "init_args": full}, "x")
    assert again.made_of == (None, torch.relu, torch.float32, (1, 2))


def test_the_kernels_that_null_stands_for_and_those_beside_given_ones() -> None:
    laplace = {"class_path": "pml_regularizers.LaplaceKernel"}
    given = {"kernels": {"pooled": laplace}}
    found = arguments({"class_path": "pml_regularizers.JRDLoss", "init_args": given})["kernels"]
    assert list(found) == ["pooled", "embeddings", "classes"]
    assert found["pooled"]["class_path"] == laplace["class_path"]
    kernels = {name: build(kernel, "losses.loss.x") for name, kernel in found.items()}
    expected = JRDLoss(3, 8, kernels={"pooled": kernels["pooled"]}).kernels
    assert [state(kernel) for kernel in JRDLoss(3, 8, kernels=kernels).kernels.values()] == [
        state(kernel) for kernel in expected.values()
    ]
    found = arguments({"class_path": "pml_regularizers.JRSRegularizer"})["kernels"]
    for name, kernel in JRSRegularizer().kernels.items():
        assert build(found[name], "x").__dict__["normalize"] == kernel.normalize
    # Another kernel of JRS is all that there are.
    found = arguments({"class_path": "pml_regularizers.JRSRegularizer", "init_args": given})
    assert list(found["kernels"]) == ["pooled"]


def test_null_is_not_what_the_runner_fills_in_and_a_default_is_not_passed() -> None:
    path = f"{PML}.losses.MarginLoss"
    assert "num_classes" not in arguments({"class_path": path})
    written = arguments({"class_path": path, "init_args": {"num_classes": None}})
    assert written["num_classes"] is None
    written = {"class_path": path, "init_args": written | {"learn_beta": True}}
    assert build(written, "loss", num_classes=7).beta.shape == (1,)
    vicreg = {"class_path": f"{PML}.losses.VICRegLoss"}  # refuses its own default
    full = arguments(vicreg)
    assert isinstance(build({**vicreg, "init_args": full}, "x"), losses.VICRegLoss)


# --------------------------------------------------------------------------------- what becomes of it


def descriptions() -> dict[str, tuple[str, Any]]:
    """{text: (where it stands, description)} of the recipes' classes; numbers are alike."""
    found: dict[str, tuple[str, Any]] = {}

    def kinds(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kinds(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [*map(kinds, value)]
        return type(value).__name__ if isinstance(value, (int, float)) else value

    def look(key: str, value: Any) -> None:
        if isinstance(value, dict) and "class_path" in value:
            found[json.dumps([key, kinds(value)], sort_keys=True)] = key, value
        elif isinstance(value, (dict, list)):
            for inner in value.values() if isinstance(value, dict) else value:
                look(key, inner)

    for settings in [read_entry(name).settings for name in recipe_names()]:
        for key in DESCRIBED:
            value: Any = settings
            for part in key.split("."):
                value = (value or {}).get(part)
            look(key, value)
    return found


def state(value: Any) -> Any:
    """State of an object, comparable: its class and its attributes; of tensors only the shape."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        return {str(name): state(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [state(inner) for inner in value]
    if isinstance(value, MADE) or type(value).__module__.startswith("pml_regularizers"):
        return type(value), {name: state(inner) for name, inner in vars(value).items()}
    return value if isinstance(value, (str, int, float, type(None))) else type(value)


def provided() -> Iterator[tuple[str, dict[str, Any]]]:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(network.parameters())
    yield from (("losses", SIZES), ("miner", SIZES), ("model.attention", {"num_features": 8}))
    yield "optimization.optimizer", {"params": list(network.parameters()), "lr": 0.1}
    yield (
        "optimization.scheduler",
        {"optimizer": optimizer, "max_lr": [0.1], "total_steps": 9},
    )


def test_the_recipes_classes_build_the_same_with_their_defaults() -> None:
    of = dict(provided())
    seen = descriptions()
    assert len(seen) > 40
    for key, description in seen.values():
        full = resolved(description, key)
        assert full["init_args"].keys() >= (description.get("init_args") or {}).keys()
        with torch.device("meta"):
            first, second = (build(one, key, **of[key]) for one in (description, full))
        assert state(first) == state(second), full


def test_what_the_builders_provide_is_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {}

    def spy(spec: Any, key: str, **given: Any) -> Any:
        seen.setdefault(key.partition("[")[0], set()).update(given)
        return build(spec, key, **given)

    for module in ("building.network", "building.objective"):
        monkeypatch.setattr(f"benchmarks.{module}.build", spy)
    attention = "--model.attention={class_path: pml_regularizers.VEMAttention}"
    try_one_step(parse([MINER, attention]).experiment)
    assert seen == {key: set(names) for key, (*_, names) in DESCRIBED.items()}
