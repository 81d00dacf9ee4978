"""Effects of a setting: on nothing, on the record or on the result."""

from typing import Any

import pytest

from benchmarks.settings.command import parse
from benchmarks.settings.differences import (
    ABSENT,
    MOVES,
    Change,
    changes_of_methods,
    changes_of_results,
    config_changes,
    flat,
    settings_of_results,
)
from benchmarks.settings.former import SETTINGS


def config(**changes: Any) -> dict[str, Any]:
    return {"seed": 0, "data": {"fold": 0, "root": "data"}, "evaluation": {"every": 5}} | changes


OLD = {
    **{"data": {"crop_to_box": False, "fold": 1}, "model": {"compile": False}, "trackers": []},
    "optimization": {"max_gradient_norm": None},
}


def test_the_tables_name_settings_that_there_are_or_were() -> None:
    known = flat(parse([]).config)
    assert set(MOVES) <= {*known, *SETTINGS}


def test_former_settings_without_effect_are_no_difference() -> None:
    """Older runs are compared, and named in files of results, as if they had been made today."""
    now = {"data": {"fold": 1}, "model": {}, "optimization": {}}
    assert config_changes(OLD, now) == config_changes(now, OLD) == []
    assert settings_of_results(OLD) == settings_of_results(now)
    assert settings_of_results(now)["model.compile"] is False
    compiled = OLD | {"model": {"compile": True}}
    assert config_changes(compiled, now) == [Change("model.compile", True, False)]
    # A missing setting counts as null; NaN and a number of another type are no change.
    before, now = ({"a": [float("nan")], "b": float("nan"), "c": c, "d": None} for c in (1, 1.0))
    assert config_changes(before, now) == []


@pytest.mark.parametrize(
    ("now", "resumption", "results", "methods"),
    [
        ({"data": {"fold": 0, "root": "elsewhere"}}, [], [], []),
        ({"seed": 1}, ["seed"], [], []),
        ({"data": {"fold": 1, "root": "data"}}, ["data.fold"], ["data.fold"], []),
        ({"precision": "bf16"}, ["precision"], ["precision"], ["precision"]),
        ({"evaluation": {"every": 6}}, ["evaluation.every"], [], []),
        ({"evaluation": {"every": 5, "verification": False}}, [], [], []),
        (
            {"evaluation": {"every": 5, "verification": True}},
            *[["evaluation.verification"], [], []],
        ),
        (
            {"evaluation": {"every": 6, "oracle": True}},
            *[["evaluation.every", "evaluation.oracle"]] * 3,
        ),
    ],
)
def test_what_differs_where(
    now: dict[str, Any], resumption: list[str], results: list[str], methods: list[str]
) -> None:
    for differences, expected in (
        (config_changes, resumption),
        (changes_of_results, results),
        (changes_of_methods, methods),
    ):
        found = differences(config(), config(**now))
        assert [change.key for change in found] == expected


def with_loss(path: str = "some.Loss", weight: float = 1.0, **arguments: Any) -> dict[str, Any]:
    return {"losses": [{"loss": {"class_path": path, "init_args": arguments}, "weight": weight}]}


def test_lists_of_plain_values_stay_whole() -> None:
    found = flat(with_loss(betas=[0.9, 0.99], kernels=[{"degree": 2}]) | {"a": []})
    assert found == {
        "losses[0].loss.class_path": "some.Loss",
        "losses[0].loss.init_args.betas": [0.9, 0.99],
        "losses[0].loss.init_args.kernels[0].degree": 2,
        "losses[0].weight": 1.0,
        "a": [],
    }


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (with_loss(a=1, b=2), with_loss(a=1, b=3), [("loss.init_args.b", 2, 3)]),
        (with_loss(), with_loss(a=None), [("loss.init_args.a", ABSENT, None)]),
        (with_loss(a=1), with_loss(), [("loss.init_args.a", 1, ABSENT)]),
        (
            with_loss(a=1),
            with_loss("another.Loss", weight=2.0, a=2, b=3),
            [("loss.class_path", "some.Loss", "another.Loss"), ("weight", 1.0, 2.0)],
        ),
        (
            {"losses": []},
            with_loss(a=1),
            [("loss.class_path", None, "some.Loss"), ("weight", None, 1.0)],
        ),
    ],
)
def test_arguments_of_classes_are_compared_one_by_one(
    before: dict[str, Any], now: dict[str, Any], changes: list[tuple[str, Any, Any]]
) -> None:
    expected = [Change(f"losses[0].{key}", old, new) for key, old, new in changes]
    found = [change for change in config_changes(before, now) if change.key != "losses"]
    assert found == expected
