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

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes"


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
        cells: The paper's numbers, {test-time output: {metric: percent}}.
        half_widths: Half-widths of the paper's own 95 % intervals.
    """

    name: str
    training: str
    settings: dict[str, Any]
    label: str
    cells: dict[str, dict[str, float]]
    half_widths: dict[str, dict[str, float]]

    @cached_property
    def remarks(self) -> dict[str, list[Remark]]:
        """Remarks on the training and its paper, by the keys of PAPER.yaml; none if there is no such file."""
        paper, table, _ = self.name.split("/")
        path = RECIPES / f"{paper}.yaml"
        content = read_yaml(path) if path.exists() else {}
        about = f"{table} {self.settings.get('data', {}).get('dataset', '')} {self.label}"
        return {
            key: [Remark(**line) for line in lines if re.search(line.get("of", ""), about)]
            for key, lines in content.items()
        }


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
    tables = {table: read_yaml(RECIPES / f"{table}.yaml") for table in table_names()}
    return [f"{table}/{row}" for table, content in tables.items() for row in content["trainings"]]


def is_recipe(name: str) -> bool:
    """True if there is an entry of this name; reads its table alone."""
    table, _, row = name.rpartition("/")
    return table in table_names() and row in _content(table)["trainings"]


def read_table(name: str) -> RecipeTable:
    """Read PAPER/TABLE, or the rows of it that PAPER/TABLE/PATTERN names; a ConfigError if there are none."""
    name, pattern = name.rsplit("/", 1) if name.count("/") == 2 else (name, None)
    content = _content(name)
    rows = fnmatch.filter(content["trainings"], pattern or "*")
    if not rows:
        raise _unknown_row(pattern, name, content)
    entries = [read_entry(f"{name}/{row}") for row in rows]
    quoted = [] if pattern else content.get("quoted", [])
    return RecipeTable(content.get("title", name), entries, quoted)


def _unknown_row(row: str | None, table: str, content: Mapping[str, Any]) -> ConfigError:
    there = ", ".join(content["trainings"])
    return ConfigError(f"recipe: no {row!r} in {table}; there are {there}")


def read_entry(name: str) -> Entry:
    """Read the entry PAPER/TABLE/ROW; a ConfigError, which lists the existing ones, if there is no such entry."""
    if name.count("/") != 2:
        raise ConfigError(
            f"recipe: expected PAPER/TABLE/ROW, got {name!r}; benchmarks/run.py --list shows them"
        )
    table, _, row = name.rpartition("/")
    content = _content(table)
    if row not in content["trainings"]:
        raise _unknown_row(row, table, content)
    own = content["trainings"][row] or {}
    settings = merge(content.get("shared", {}), own)
    cells, half_widths = settings.pop("cells", {}), settings.pop("half_widths", {})
    training = settings.pop("same_as", name)
    if training != name:
        origin = read_entry(training)
        training, settings, label = origin.training, origin.settings, own.get("label", origin.label)
    else:
        label = settings.get("label", name)
        if weights := settings.get("model", {}).get("weights"):
            settings["model"]["weights"] = str(RECIPES.parents[1] / weights)
    return Entry(name, training, settings, label, cells, half_widths)


def _content(table: str) -> dict[str, Any]:
    if table not in table_names():
        raise ConfigError(
            f"recipe: no table {table!r}; there are {', '.join(table_names())}, and --list shows their entries"
        )
    return read_yaml(RECIPES / f"{table}.yaml")


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings into others, level by level; the description of a class is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and "class_path" not in value:
            value = merge(old, value)
        merged[key] = value
    return merged
