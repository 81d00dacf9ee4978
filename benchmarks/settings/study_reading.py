"""Reads a study's file, and refuses one whose comparisons would not be fair."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import jsonargparse

from benchmarks.console import printable
from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.recipe_files import RECIPES, recipe_names
from benchmarks.settings.study_files import Choice, Comparison, Seeds, StudyFile, StudyRow
from benchmarks.settings.yaml_files import read_yaml

STUDIES = RECIPES / "studies"


def study_names() -> list[str]:
    """The studies that come with the runner."""
    return sorted(
        path.relative_to(STUDIES).with_suffix("").as_posix() for path in STUDIES.rglob("*.yaml")
    )


def read_study(study: str) -> StudyFile:
    """Read a study by its name or its file.

    Raises:
        ConfigError: naming the file and what is wrong in it.
    """
    path = Path(study) if study.endswith((".yaml", ".yml")) else STUDIES / f"{study}.yaml"
    if not path.exists():
        raise ConfigError(
            f"STUDY: no {study!r}; expected a file .yaml, or one of {', '.join(study_names())}"
        )
    content = read_yaml(path)
    try:
        recipes = content.pop("recipes", None)
        for part in ("rows", "comparisons"):
            if not isinstance(content[part], dict):
                raise ValueError(f"{part}: expected a mapping of names, got {content[part]!r}")
        rows = {
            str(name): _read(StudyRow, {"recipe": f"{recipes}/{name}", **(row or {})})
            for name, row in content.pop("rows").items()
        }
        comparisons = [
            _read(Comparison, {"name": str(name), **comparison})
            for name, comparison in content.pop("comparisons").items()
        ]
        parts: dict[str, Any] = {
            key: _read(kind, content.pop(key) or {})
            for key, kind in (("choice", Choice), ("seeds", Seeds))
            if key in content
        }
        name = study if path.parent.is_relative_to(STUDIES) else path.stem
        made = {"name": name, "rows": rows, "comparisons": comparisons, **parts}
        others = jsonargparse.ArgumentParser(exit_on_error=False)
        others.add_class_arguments(StudyFile, skip=set(made) | {"choice", "seeds"})
        found = StudyFile(**made, **vars(others.parse_object(content)))
        _check(found)
    except (argparse.ArgumentError, AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"{error.args[0]} is missing" if isinstance(error, KeyError) else one_line(error)
        raise ConfigError(f"{path}: {said}") from error
    return found


def _read(kind: Any, content: Mapping[str, Any]) -> Any:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    if unknown := sorted(set(content) - {one.name for one in fields(kind)}):
        raise ValueError(f"{unknown[0]}: no key of {kind.__name__}; leave it out")
    parsed = vars(parser.parse_object(dict(content)))
    return kind(**{key: _line(value) for key, value in parsed.items()})


def _line(value: Any) -> Any:
    """Text in one line, as tables need it."""
    return printable(" ".join(value.split())) if isinstance(value, str) else value


def _check(study: StudyFile) -> None:
    """Raise a ValueError if rows are unknown or in a circle, or a comparison is not fair."""
    if study.margin > 100:
        raise ValueError(f"margin: expected percentage points, at most 100, got {study.margin:g}")
    if bool(study.seeds.more) != (study.seeds.wider_than is not None):
        raise ValueError("seeds: more and wider_than belong together; give both, or neither")
    if study.agrees == study.primary:
        raise ValueError(f"agrees: expected another metric than the primary one, {study.primary}")
    recipes = recipe_names()
    for name, row in study.rows.items():
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"rows: {name!r} is a folder's name, too; expected letters, digits, . _ and -"
            )
        if row.recipe not in recipes:
            raise ValueError(
                f"rows.{name}.recipe: no recipe {row.recipe!r}; expected PAPER/TABLE/ROW"
            )
        for other in row.takes:
            if other not in study.rows:
                raise ValueError(f"rows.{name}.takes: no row {other!r}")
            if study.tested_on(other) != study.tested_on(name):
                raise ValueError(
                    f"rows.{name}.takes: settings of {other!r}, which may have seen this row's test classes"
                )
        for setting, values in row.choose.items():
            if setting.startswith(("data.split", "data.fold", "seed", "evaluation")):
                raise ValueError(f"rows.{name}.choose.{setting}: says how a candidate is measured")
            if len(set(values)) < len(values) or not values:
                raise ValueError(f"rows.{name}.choose.{setting}: expected different values")
    try:
        TopologicalSorter({name: row.takes for name, row in study.rows.items()}).prepare()
    except CycleError as error:
        other, name, *_ = error.args[1]
        raise ValueError(
            f"rows.{name}.takes: {other!r} takes over the settings of {name!r}"
        ) from error
    if not study.comparisons:
        raise ValueError("comparisons: expected at least one")
    for name in study.rows:
        choosing = [setting for one in study.needed([name]) for setting in study.rows[one].choose]
        if twice := [setting for setting in choosing if choosing.count(setting) > 1]:
            raise ValueError(
                f"rows.{name}: {twice[0]} is chosen by two of the rows that it takes over"
            )
    for comparison in study.comparisons:
        at = f"comparisons.{comparison.name}"
        if comparison.better == comparison.than:
            raise ValueError(f"{at}: compares {comparison.than!r} with itself")
        try:
            comparison.reported_gain()
        except (ConfigError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{at}.reported: expected two recipes of a paper that report Recall@1, got {comparison.reported}"
            ) from error
        for row in comparison.rows():
            if row not in study.rows:
                raise ValueError(f"{at}: no row {row!r}")
        if len(set(map(study.tested_on, comparison.rows()))) > 1:
            raise ValueError(f"{at}: its rows have different --data.test_classes")
        budgets = [study.budget(row) for row in comparison.rows()]
        wholes = {study.budget(row, whole=True) for row in comparison.rows()}
        if study.choice.equal_budget and len({*budgets}) + len(wholes) > 2:
            said = " and ".join(
                f"{n} for {row}" for row, n in zip(comparison.rows(), budgets, strict=True)
            )
            raise ValueError(
                f"{at}: its rows choose from unequal numbers of settings, {said}; give both as many, or set "
                "choice.equal_budget: false, which the page tells"
            )
