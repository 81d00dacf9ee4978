"""Settings by their paths: changed, and compared between two runs.

A difference has an effect on nothing, on the record, or on the result.
"""

import argparse
import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, lru_cache
from typing import Any, TypeVar, get_type_hints

import jsonargparse

from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.types import ClassSpec

Settings = TypeVar("Settings")

ABSENT = "absent"
"""Placeholder for an argument that one of two descriptions of a class lacks, such as an old record's."""

VOLATILE = (
    *("output", "report", "trackers", "data.root", "data.table"),
    *("data.download", "data.num_workers", "data.cache", "data.cache_gib"),
)
"""Settings without effect, which may differ between a run and its resumption; images have a fingerprint."""

EVALUATION = ("batch_size", "curve_classes", "save_embeddings", "verification")

MOVES = (
    *(*VOLATILE, "label", "checkpoint_every", "diagnose_every"),
    *(f"evaluation.{name}" for name in EVALUATION),
    "seed",  # identifies a sample of the result
    "model.weights",  # the file's place; the record identifies the file
)
"""Settings that change no more than the record; those that are not named can change the result."""


@dataclass(frozen=True)
class Change:
    """A setting that differs."""

    key: str
    before: Any
    now: Any


def config_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = VOLATILE
) -> list[Change]:
    """The settings that differ and change the record or the result.

    A missing setting counts as null, a missing argument of a class as `ABSENT`: null would mean something else.
    If the class differs, its arguments are not listed.
    """
    old, new = flat(before), flat(now)
    changes = []
    for key in sorted({*old, *new} - set(ignored)):
        missing = ABSENT if ".init_args." in key else None
        change = Change(key, old.get(key, missing), new.get(key, missing))
        if plain(change.before) != plain(change.now):
            changes.append(change)
    classes = [change.key for change in changes if change.key.endswith(".class_path")]
    others = tuple(key.removesuffix("class_path") + "init_args." for key in classes)
    return [change for change in changes if not change.key.startswith(others)]


def plain(value: Any) -> str:
    """A setting's value as text, in which 1 equals 1.0 but not true, and NaN itself."""
    return json.dumps(_floats(value), sort_keys=True, default=str)


def _floats(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_floats(inner) for inner in value]
    exact = type(value) is int and abs(value) <= 2**53
    return float(value) if exact else value


def changes_of_results(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ and can change a number of the test, given the seed and the file of weights."""
    return config_changes(before, now, _without_effect(before, now))


def settings_of_results(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, without nulls, that can change a number of the test, given the seed and the file of weights."""
    ignored = _without_effect(config)
    return {
        key: value
        for key, value in flat(config).items()
        if key not in ignored and value is not None
    }


def _without_effect(*configs: Mapping[str, Any]) -> set[str]:
    chosen = any(  # at the points of the curves
        config.get("protocol") == "fair" or config.get("evaluation", {}).get("oracle")
        for config in configs
    )
    return {*MOVES} | (set() if chosen else {"evaluation.every"})


def changes_of_methods(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings in which two methods differ and that change the result, except held-out classes."""
    return [change for change in changes_of_results(before, now) if change.key != "data.fold"]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"data.root": ..., "losses[0].weight": ...} of nested settings; lists of plain values stay whole.

    So does an empty mapping that a class takes: it is not null.
    """
    if isinstance(config, Mapping):
        items = [(f"{prefix}.{key}" if prefix else key, value) for key, value in config.items()]
    elif isinstance(config, list) and any(isinstance(value, Mapping) for value in config):
        items = [(f"{prefix}[{i}]", value) for i, value in enumerate(config)]
    else:
        return {prefix: config}
    if not items and ".init_args." in prefix:
        return {prefix: config}
    return {name: leaf for key, value in items for name, leaf in flat(value, key).items()}


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy of resolved settings with the values at their paths.

    Args:
        settings: An `Experiment`, whose values are read as the parser reads them, or a mapping.
        values: {path: value}.
    """
    result = copy.deepcopy(settings)
    for path, value in values.items():
        try:
            known = _put(result, path, value)
        except argparse.ArgumentError as error:
            name = path.rpartition(".")[2]
            raise ConfigError(f"{path}: {one_line(error).removeprefix(f'{name}: ')}") from error
        if not known:
            raise ConfigError(
                f"{path}: leads nowhere in the settings of the recipe, which benchmarks/run.py --print_config shows"
            )
    return replace(result) if is_dataclass(result) else result  # type: ignore[type-var]


def _put(part: Any, path: str, value: Any) -> bool:
    """Set the value at a path below this part; False if it leads nowhere."""
    typed: Any = type(part) if is_dataclass(part) else None
    part = vars(part) if typed else part.description if isinstance(part, ClassSpec) else part
    steps: dict[str, Any] = {}
    if isinstance(part, list):
        steps = {f"[{i}]": i for i in range(len(part))}
    elif isinstance(part, dict):
        # Values that the runner fills in, and those that YAML cannot hold, may be missing.
        new = {} if typed or "." in path or "[" in path else {path: path}
        steps = new | {str(name): name for name in part}
    if path in steps:
        read = _read_once if isinstance(value, (bool, int, float, str)) else _read
        part[steps[path]] = copy.deepcopy(read(typed, path, value)) if typed else value
        return True
    # Names may hold dots: those of optimization.overrides do.
    ways = [step for step in steps if path.startswith((f"{step}.", f"{step}["))]
    return any(_put(part[steps[way]], path[len(way) :].removeprefix("."), value) for way in ways)


def _read(group: type, name: str, value: Any) -> Any:
    """A value of a setting of a group, as the parser reads it."""
    return _reader(group, name).parse_object({name: value})[name]


_read_once = lru_cache(maxsize=None, typed=True)(_read)  # a study's jobs share most of their values


@cache
def _reader(group: type, name: str) -> jsonargparse.ArgumentParser:
    """The parser of a setting of a group."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False, parser_mode="strict")
    parser.add_argument(f"--{name}", type=get_type_hints(group)[name])
    return parser
