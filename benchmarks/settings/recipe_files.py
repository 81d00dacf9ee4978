"""Recipes: one YAML file per table of a paper, one entry per training.

title: ...                                  one line over the printed table
shared: {...}                               settings of all trainings
trainings:
  ROW:
    label: ...                              the paper's name of the row, and the settings that differ
    cells: {OUTPUT: {METRIC: number}}       what the paper reports of each test-time output, in percent
    half_widths: {OUTPUT: {METRIC: number}} of the paper's own 95 % intervals, in percent points
  OTHER_ROW: {same_as: PAPER/TABLE/ROW, cells: ...}      another row of a training that is not run twice
quoted: [{row: ..., dataset: ..., METRIC: number}, ...]  what the paper copied from elsewhere

Beside the folder of a paper's tables lies PAPER.yaml:

differs: [{facts: {...}, of: ..., text: ...}, ...]    how trainings differ from the paper
not_given: [{facts: {...}, of: ..., text: ...}, ...]  what the paper leaves open, and what was chosen
printed: [{of: ..., text: ...}, ...]                  what is odd about the numbers that it prints
published_code: [{of: ..., text: ...}, ...]           where the trainings follow the paper and its code does not

A relative path of `model.weights` starts at the repository, wherever the command is given.

`of` is a regular expression, searched in "TABLE DATASET LABEL" of an entry; without one, all are meant. The facts
are those of tests/references/settings.yaml, each with what is built, or null where it is not read or not one value;
their test holds these lines against what is built.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import misfit, read_yaml

RECIPES = Path(__file__).parents[1] / "recipes"

GROUPS = ("data", "model", "optimization", "evaluation")
"""Settings that hold mappings."""

CELLS = {...: {...: (int, float)}}

ENTRY = {
    **{"label": str, "cells": CELLS, "half_widths": CELLS, "same_as": str},
    **dict.fromkeys(GROUPS, dict),
    ...: object,
}
TABLE = {
    **{"title": str, "shared": dict, "trainings": {...: (dict, NoneType)}},
    "quoted": [{"row": str, "dataset": str}],
    ...: (),  # the kind of no value: there are no other keys
}
PAPER = {
    **{key: [{"text": str}] for key in ("differs", "not_given", "printed", "published_code")},
    ...: (),
}
"""Kinds of the values of an entry and of the two files; see `misfit`."""

Cells = dict[str, dict[str, float]]
"""{test-time output: {metric: percent}}"""


@dataclass(frozen=True)
class Remark:
    """A line of PAPER.yaml: its text, its facts with their values, and its entries."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""


@dataclass(frozen=True)
class Entry:
    """A row of a table, or several rows of one training.

    Args:
        name: PAPER/TABLE/ROW.
        training: Name of the entry that defines the training: its own, or that of `same_as`.
        settings: Settings of the training.
        label: The paper's name of the row.
        remarks: Remarks on the training and its paper, by the keys of PAPER.yaml.
        cells: The paper's numbers.
        half_widths: Half-widths of the paper's own 95 % intervals.
    """

    name: str
    training: str
    settings: dict[str, Any]
    label: str
    remarks: dict[str, list[Remark]] = field(default_factory=dict)
    cells: Cells = field(default_factory=dict)
    half_widths: Cells = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeTable:
    """A file of recipes."""

    title: str
    entries: list[Entry]
    quoted: list[dict[str, Any]]


def table_names() -> list[str]:
    """PAPER/TABLE of all files."""
    return [
        str(path.relative_to(RECIPES).with_suffix(""))
        for path in sorted(RECIPES.glob("*/*.yaml"))
        if path.parent.name != "studies"
    ]


def recipe_names() -> list[str]:
    """PAPER/TABLE/ROW of all entries."""
    return [f"{table}/{row}" for table in table_names() for row in _content(table)["trainings"]]


def read_table(name: str) -> RecipeTable:
    """Read all entries of PAPER/TABLE.

    Raises:
        ConfigError: if there is no such file, or it is not as described above.
    """
    content = _content(name)
    entries = [read_entry(f"{name}/{row}") for row in content["trainings"]]
    return RecipeTable(content.get("title", name), entries, content.get("quoted", []))


def read_entry(name: str) -> Entry:
    """Read the entry PAPER/TABLE/ROW.

    Raises:
        ConfigError: if there is no such entry; it lists the existing ones.
    """
    table, _, row = name.rpartition("/")
    content = _content(table)
    if row not in content["trainings"]:
        there = ", ".join(content["trainings"])
        raise ConfigError(f"recipe: no {row!r} in {table}; there are {there}")
    own = content["trainings"][row] or {}
    settings = merge(content.get("shared", {}), own)
    _check(name, settings, ENTRY)
    cells, half_widths = settings.pop("cells", {}), settings.pop("half_widths", {})
    training = settings.pop("same_as", name)
    if training != name:
        if further := own.keys() - {"label", "cells", "half_widths", "same_as"}:
            said = f"has the settings of {training}; leave out {', '.join(sorted(further))}"
            raise ConfigError(f"{name}: {said}")
        origin = read_entry(training)
        training, settings, label = origin.training, origin.settings, own.get("label", origin.label)
    else:
        label = settings.get("label", name)
        if weights := settings.get("model", {}).get("weights"):
            from_root = str(RECIPES.parents[1] / str(weights))
            settings = merge(settings, {"model": {"weights": from_root}})
    remarks = _remarks(table, f"{settings.get('data', {}).get('dataset', '')} {label}")
    return Entry(name, training, settings, label, remarks, cells, half_widths)


def _remarks(name: str, about: str) -> dict[str, list[Remark]]:
    """The lines of PAPER.yaml on an entry; none if there is no such file."""
    paper, _, table = name.partition("/")
    path = RECIPES / f"{paper}.yaml"
    content = read_yaml(path) if path.exists() else {}
    _check(path, content, PAPER)
    try:
        remarks = {key: [Remark(**line) for line in lines] for key, lines in content.items()}
        return {
            key: [remark for remark in found if re.search(remark.of, f"{table} {about}")]
            for key, found in remarks.items()
        }
    except (TypeError, re.error) as error:
        raise ConfigError(
            f"{path}: expected lines {{facts: {{...}}, of: REGEX, text: ...}}: {error}"
        ) from error


def _content(table: str) -> dict[str, Any]:
    if table not in table_names():
        raise ConfigError(
            f"recipe: no table {table!r}; there are {', '.join(table_names())}, and --list shows their entries"
        )
    path = RECIPES / f"{table}.yaml"
    content = {"trainings": {}} | read_yaml(path)
    _check(path, content, TABLE)
    return content


def _check(place: object, content: Mapping[str, Any], kinds: Mapping[Any, Any]) -> None:
    if (wrong := misfit(content, kinds)) is not None:
        raise ConfigError(
            f"{place}: its {wrong} is not as benchmarks/settings/recipe_files.py describes it"
        )


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings into others, level by level; the description of a class is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both and "class_path" not in value else value
    return merged
