"""Descriptions of classes with all their defaults: their contents, and that they build the same objects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from pytorch_metric_learning import losses
from torch import nn

from benchmarks.run import main
from benchmarks.settings.class_paths import DESCRIBED, build, resolved
from benchmarks.settings.command import parse
from benchmarks.settings.recipe_files import read_entry, recipe_names
from benchmarks.training.parts import try_one_step

PML = "pytorch_metric_learning"
SIZES = {"num_classes": 3, "in_channels": 8, "embedding_size": 8}
MINER = f"--miner={{class_path: {PML}.miners.DistanceWeightedMiner}}"


def arguments(class_path: str, **given: Any) -> dict[str, Any]:
    """Arguments in the resolved settings for a description without its defaults."""
    description = {"class_path": class_path, "init_args": given}
    return dict(resolved(description, "losses.x")["init_args"])


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*options, "--print_config"]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def test_every_default_is_printed_and_reads_back(tmp_path, capsys):
    config = printed(capsys, "--recipe=glyphs/demo/binomial_horde", MINER)
    horde = config["losses"][0]["loss"]["init_args"]
    assert {"projections", "init", "normalize", "checkpoint"} <= horde.keys()
    assert not SIZES.keys() & horde.keys()
    assert horde["loss"]["init_args"]["reducer"]["class_path"].endswith(".SumReducer")
    assert config["miner"]["init_args"]["distance"]["init_args"]["p"] == 2
    optimizer = config["optimization"]["optimizer"]["init_args"]
    assert (optimizer["betas"], optimizer["eps"]) == ([0.9, 0.999], 1e-8)
    assert not {"params", "lr"} & optimizer.keys()
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
    path = f"{__name__}.Odd"
    assert arguments(path) == {"sizes": [1, 2]}
    full = arguments(path, needed=None)
    assert full == {"needed": None, "sizes": [1, 2]}
    again = build({"class_path": path, "init_args": full}, "x")
    assert again.made_of == (None, torch.relu, torch.float32, (1, 2))


def test_null_is_not_what_the_runner_fills_in_and_a_default_is_not_passed() -> None:
    path = f"{PML}.losses.MarginLoss"
    assert "num_classes" not in arguments(path)
    written = arguments(path, num_classes=None, learn_beta=True)
    assert written["num_classes"] is None
    built = build({"class_path": path, "init_args": written}, "loss", num_classes=7)
    assert built.beta.shape == (1,)
    path = f"{PML}.losses.VICRegLoss"  # refuses its own default
    full = {"class_path": path, "init_args": arguments(path)}
    assert isinstance(build(full, "x"), losses.VICRegLoss)


def descriptions() -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, description) of the recipes' classes, one for each choice of arguments."""
    found = {}
    for settings in [read_entry(name).settings for name in recipe_names()]:
        described = [("losses", term["loss"]) for term in settings["losses"]]
        for key in [*DESCRIBED][1:]:
            value: Any = settings
            for part in key.split("."):
                value = (value or {}).get(part)
            described += [(key, value)] if value else []
        for key, value in described:
            found[key, value["class_path"], *(value.get("init_args") or {})] = key, value
    return [*found.values()]


def state(value: Any) -> Any:
    """State of an object, comparable: its class and its attributes; of tensors only the shape."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        return {str(name): state(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [state(inner) for inner in value]
    if type(value).__module__.startswith(("torch.", "pml_regularizers", PML)):
        return type(value), state(getattr(value, "__dict__", None))
    return value if isinstance(value, (str, int, float, type(None))) else type(value)


def test_the_recipes_classes_build_the_same_with_their_defaults() -> None:
    network = nn.Linear(2, 2)
    schedule = {"max_lr": [0.1], "total_steps": 9}
    provided = {
        **{"losses": SIZES, "miner": SIZES, "model.attention": {"num_features": 8}},
        "optimization.optimizer": {"params": list(network.parameters()), "lr": 0.1},
        "optimization.scheduler": schedule | {"optimizer": torch.optim.Adam(network.parameters())},
    }
    seen = descriptions()
    assert {key for key, _ in seen} == set(DESCRIBED)
    for key, description in seen:
        full = resolved(description, key)
        assert full["init_args"].keys() >= (description.get("init_args") or {}).keys()
        with torch.device("meta"):
            first, second = (build(one, key, **provided[key]) for one in (description, full))
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
