"""Ranges of a search: what their file may hold, and where their values go."""

import json
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from benchmarks.settings import ConfigError, changed
from benchmarks.studies.search import read_space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "space.yaml: expected a mapping"),
        ("{}", "at least one setting"),
        *(
            (f"a: {given}", "a: expected {low: NUMBER, high: LARGER NUMBER}.* got")
            for given in (
                "{low: 1, hihg: 2}",
                "{choices: [avg]}",
                "{choices: [{a: 1}, 2]}",
                "{low: 2, high: 1}",
                "{low: 0, high: 1, log: true}",
                "{low: 1, high: 1.5, int: true}",
                "{low: 1, high: .inf}",
                "{low: a, high: 2}",
                "{low: '1e-3', high: 1}",
                "{low: no, high: 2}",
                "{low: 1, high: 2, int: 'no'}",
                "{low: 1, high: 2, log: 'off'}",
                "{low: 1, high: 2, log: 1}",
            )
        ),
        ("a: {low: 1, high: 2}\na: {low: 1, high: 2}", "appears twice"),
        *(
            (f"{key}: {{low: 1, high: 2}}", f"{key}: says what a trial is measured on")
            for key in ("seed", "data.split", "evaluation.every")
        ),
    ],
)
def test_wrong_spaces(text: str, message: str, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        read_space(space)


def test_ranges(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "a: {low: 1e-4, high: 1, log: true}\nb: {low: 2, high: 8, int: true}\nc: {choices: [x, null, 1]}"
    )
    space = read_space(path)
    assert space == {
        "a": FloatDistribution(1e-4, 1.0, log=True),
        "b": IntDistribution(2, 8),
        "c": CategoricalDistribution(["x", None, 1]),
    }


def test_paths_into_settings() -> None:
    settings: dict[str, Any] = {
        "losses": [
            {"weight": 1.0},
            {"loss": {"init_args": {"x": 1}}, "weight": {"init_args": {"end": 1}}},
        ],
        "optimization": {"overrides": {"model.head": {"lr": 1}, "model.head.fc": {"lr": 2}}},
    }
    before = json.dumps(settings)
    found = changed(
        settings,
        {
            "losses[0].weight": 3,
            "losses[1].loss.init_args.x": 4,
            "losses[1].weight.init_args.end": 5,
            "optimization.overrides.model.head.fc.lr": 6,
            "optimization.loss_learning_rate": 7,
        },
    )
    assert found == {
        "losses": [
            {"weight": 3},
            {"loss": {"init_args": {"x": 4}}, "weight": {"init_args": {"end": 5}}},
        ],
        "optimization": {
            "overrides": {"model.head": {"lr": 1}, "model.head.fc": {"lr": 6}},
            "loss_learning_rate": 7,
        },
    }
    assert json.dumps(settings) == before
