"""Effects of a setting: on nothing, on the record or on the result."""

from typing import Any

from benchmarks.settings.command import parse
from benchmarks.settings.differences import (
    ABSENT,
    MOVES,
    Change,
    changed,
    changes_of_methods,
    changes_of_results,
    config_changes,
    flat,
    plain,
    settings_of_results,
)


def config(**changes: Any) -> dict[str, Any]:
    return {"seed": 0, "data": {"fold": 0, "root": "data"}, "evaluation": {"every": 5}} | changes


def test_the_table_names_settings_that_there_are():
    assert set(MOVES) <= {*flat(parse([]).config)}


def test_nulls_nan_and_types_are_no_difference():
    old, now = {"data": {"fold": 1}, "model": {"head": None}}, {"data": {"fold": 1}, "model": {}}
    assert config_changes(old, now) == config_changes(now, old) == []
    assert settings_of_results(old) == settings_of_results(now)
    compiled = old | {"model": {"compile": True}}
    assert config_changes(compiled, now) == [Change("model.compile", True, None)]
    before, now = ({"a": [float("nan")], "b": float("nan"), "c": c, "d": None} for c in (1, 1.0))
    assert config_changes(before, now) == []
    assert config_changes({"c": [1]}, {"c": [True]}) == [Change("c", [1], [True])]


def test_what_differs_where():
    for now, resumption, results, methods in (
        ({"data": {"fold": 0, "root": "elsewhere"}}, [], [], []),
        ({"seed": 1}, ["seed"], [], []),
        ({"data": {"fold": 1, "root": "data"}}, ["data.fold"], ["data.fold"], []),
        ({"precision": "bf16"}, *[["precision"]] * 3),
        ({"evaluation": {"every": 6}}, ["evaluation.every"], [], []),
        ({"evaluation": {"every": 6}, "protocol": "fair"}, *[["evaluation.every", "protocol"]] * 3),
    ):
        for differences, expected in (
            (config_changes, resumption),
            (changes_of_results, results),
            (changes_of_methods, methods),
        ):
            assert [change.key for change in differences(config(), config(**now))] == expected


def with_loss(path: str = "some.Loss", weight: float = 1.0, **arguments: Any) -> dict[str, Any]:
    return {"losses": [{"loss": {"class_path": path, "init_args": arguments}, "weight": weight}]}


def test_arguments_of_classes_are_compared_one_by_one():
    for now, changes in (
        (with_loss(a=1, b=3), [("loss.init_args.b", ABSENT, 3)]),
        (with_loss(a=None), [("loss.init_args.a", 1, None)]),
        # Of another class, all arguments would differ.
        (
            with_loss("another.Loss", weight=2.0, a=2, b=3),
            [("loss.class_path", "some.Loss", "another.Loss"), ("weight", 1.0, 2.0)],
        ),
    ):
        expected = [Change(f"losses[0].{key}", old, new) for key, old, new in changes]
        assert config_changes(with_loss(a=1), now) == expected


def test_no_two_settings_that_can_change_a_result_are_one() -> None:
    """Of each recipe: any setting changed, any override left out, and an empty mapping in place of null."""
    found: dict[str, Any] = {}
    for name in ("margin_vem", "binomial_energy_confusion"):
        whole = parse(["--recipe", f"glyphs/finetune/{name}"]).resolved().config
        kept = [path for path in flat(whole) if path not in {*MOVES, "evaluation.every"}]
        others = [changed(whole, {path: "other"}) for path in kept]
        others += [changed(whole, {path: {}}) for path in kept if ".init_args." in path]
        overrides = whole["optimization"]["overrides"]
        for path in overrides:
            less = {key: value for key, value in overrides.items() if key != path}
            others.append(changed(whole, {"optimization.overrides": less}))
            assert config_changes(whole, others[-1]), path
        for settings in (whole, *others):
            own = flat(settings)
            moving = {path: own.get(path) for path in {*kept, *own} if path not in MOVES}
            identity_of = plain(sorted(settings_of_results(settings).items()))
            assert found.setdefault(identity_of, moving) == moving, name
    assert len(found) > 200
