"""Which settings differ between two runs, and what a setting can move: nothing, the record, or the result."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

NOTHING, RECORD = "nothing", "the record"

ABSENT = "absent"
"""In place of an argument that one of two descriptions of a class does not have, such as an old record's."""

MOVES = {
    **dict.fromkeys(("output", "report", "data.root", "data.num_workers"), NOTHING),
    **dict.fromkeys(("label", "trackers", "checkpoint_every", "diagnose_every"), RECORD),
    **{f"evaluation.{name}": RECORD for name in ("batch_size", "curve_classes", "save_embeddings")},
    "seed": RECORD,  # which sample of the result it is
    "model.weights": RECORD,  # where the file lies; which file it is stands in the record
}
"""What a setting can move at most; the settings that are not named can move the result."""

VOLATILE = tuple(key for key, moved in MOVES.items() if moved == NOTHING)
"""Settings that may differ between a run and its resumption."""


@dataclass(frozen=True)
class Change:
    """A setting that differs."""

    key: str
    before: Any
    now: Any


def config_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = VOLATILE
) -> list[Change]:
    """The settings that differ and move the record or the result.

    A missing setting counts as null, a missing argument of a class as `ABSENT`: null would mean something else.
    Where the class is another one, its arguments are not listed.
    """
    old, new = flat(before), flat(now)
    keys = sorted({*old, *new} - set(ignored))
    missing = {key: ABSENT if ".init_args." in key else None for key in keys}
    old, new = missing | old, missing | new
    changed = [
        Change(key, old[key], new[key])
        for key in keys
        if old[key] != new[key] and repr(old[key]) != repr(new[key])  # nan differs from itself
    ]
    classes = [change.key for change in changed if change.key.endswith(".class_path")]
    others = tuple(key.removesuffix("class_path") + "init_args." for key in classes)
    return [change for change in changed if not change.key.startswith(others)]


def changes_of_results(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ and can move a number of the test, given the seed and the file of weights."""
    return config_changes(before, now, _without_effect(before, now))


def settings_of_results(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, by their keys, that can move a number of the test, given the seed and the file of weights."""
    ignored = _without_effect(config)
    return {key: value for key, value in flat(config).items() if key not in ignored}


def _without_effect(*configs: Mapping[str, Any]) -> set[str]:
    return {*MOVES} | (set() if any(map(_measures_to_choose, configs)) else {"evaluation.every"})


def _measures_to_choose(config: Mapping[str, Any]) -> bool:
    """Whether something is selected at the points of the curves."""
    return config.get("protocol") == "fair" or bool(config.get("evaluation", {}).get("oracle"))


def changes_of_methods(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings in which two methods differ: those that move the result, except which classes are held out."""
    return [change for change in changes_of_results(before, now) if change.key != "data.fold"]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"data.root": ..., "losses[0].weight": ...} of nested settings; lists of plain values stay whole."""
    if isinstance(config, Mapping):
        items = [(f"{prefix}.{key}" if prefix else key, value) for key, value in config.items()]
    elif isinstance(config, list) and any(isinstance(value, Mapping) for value in config):
        items = [(f"{prefix}[{i}]", value) for i, value in enumerate(config)]
    else:
        return {prefix: config}
    return {name: leaf for key, value in items for name, leaf in flat(value, key).items()}
