"""Reading a study's file, and what makes its comparisons unfair."""

import argparse
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import jsonargparse

from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.recipe_files import RECIPES, is_recipe
from benchmarks.settings.study_files import StudyFile
from benchmarks.settings.yaml_files import read_yaml

STUDIES = RECIPES / "studies"


def study_names() -> list[str]:
    """The studies that come with the runner."""
    paths = STUDIES.rglob("*.yaml")
    return sorted(path.relative_to(STUDIES).with_suffix("").as_posix() for path in paths)


def read_study(study: str) -> StudyFile:
    """Read a study by its name or its file; a ConfigError of what is wrong in it, such as an unfair comparison."""
    path = Path(study) if study.endswith((".yaml", ".yml")) else STUDIES / f"{study}.yaml"
    if not path.exists():
        raise ConfigError(
            f"STUDY: no {study!r}; expected a file .yaml, or one of {', '.join(study_names())}"
        )
    content = read_yaml(path)
    for part in ("rows", "comparisons"):
        if not isinstance(names := content.get(part), dict):
            raise ConfigError(f"{path}: {part}: expected a mapping of names, got {names!r}")
    recipes = content.pop("recipes", None)
    ours = path.resolve().is_relative_to(STUDIES)
    name = path.resolve().relative_to(STUDIES).with_suffix("").as_posix() if ours else path.stem
    content["name"] = name
    parser = jsonargparse.ArgumentParser(exit_on_error=False, parser_mode="strict")
    parser.add_class_arguments(StudyFile)
    try:
        content["rows"] = {
            str(name): {"recipe": f"{recipes}/{name}", **(row or {})}
            for name, row in content["rows"].items()
        }
        comparisons = content["comparisons"].items()
        content["comparisons"] = [{"name": str(name), **keys} for name, keys in comparisons]
        parsed = parser.parse_object(content)
        file = StudyFile(**vars(parser.instantiate(parsed)))
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error
    if (fault := next(_faults(file), None)) is not None:
        raise ConfigError(f"{path}: {fault}")
    return file


def _faults(study: StudyFile) -> Iterator[str]:
    """Lines on unknown rows and unfair comparisons; what comes after the first is not sure."""
    if bool(study.seeds.more) != (study.seeds.wider_than is not None):
        yield "seeds: more and wider_than belong together; give both, or neither"
    if study.choice.behind is not None and study.choice.finalists is None:
        yield "choice.behind: leaves rows out, so that not all can be tested; give choice.finalists, too"
    if not study.comparisons:
        yield "comparisons: expected at least one"
    above: list[str] = []
    for name, row in study.rows.items():
        at = f"rows.{name}"
        if not re.fullmatch(r"\w[\w.-]*", name):
            yield f"rows: {name!r} is a folder's name, too; expected letters, digits, . _ and -"
        if not is_recipe(row.recipe):
            yield f"{at}.recipe: no recipe {row.recipe!r}; expected PAPER/TABLE/ROW"
        for other in row.takes:
            if other not in above:
                yield f"{at}.takes: no row {other!r} above it"
            if study.tested_on(other) != study.tested_on(name):
                yield f"{at}.takes: settings of {other!r}, which may have seen this row's test classes"
        for setting, values in row.choose.items():
            if setting.startswith(("data.split", "data.fold", "seed", "evaluation")):
                yield f"{at}.choose.{setting}: says how a candidate is measured"
            if len(set(values)) < len(values) or not values:
                yield f"{at}.choose.{setting}: expected different values"
        if row.same_for_all_seeds and name not in study.untrained():
            yield f"{at}.same_for_all_seeds: is for rows with --optimization.steps=0; leave it out"
        above.append(name)
        choosing = list(chain(*(study.rows[taken].choose for taken in study.needed([name]))))
        if twice := [setting for setting in choosing if choosing.count(setting) > 1]:
            yield f"{at}: {twice[0]} is chosen by two of the rows that it takes over"
    for comparison in study.comparisons:
        at, rows = f"comparisons.{comparison.name}", comparison.all_rows()
        if comparison.better == comparison.than:
            yield f"{at}: compares {comparison.than!r} with itself"
        if comparison.beyond and (len(comparison.beyond) != 2 or comparison.family == "main"):
            yield f"{at}.beyond: expected two sides, in a family that is not main, got {comparison.beyond}"
        try:
            comparison.reported_gain()
        except (ConfigError, KeyError, RuntimeError, ValueError):
            yield f"{at}.reported: expected two recipes of a paper that report Recall@1"
        if unknown := [row for row in rows if row not in study.rows]:
            yield f"{at}: no row {unknown[0]!r}"
        unscored = [
            row for row in comparison.rows() if row in study.rows and not study.rows[row].choose
        ]
        if study.choice.finalists and comparison.family == "main" and unscored:
            yield f"{at}: choice.finalists needs a choose: of {unscored[0]}, whose scores decide what is tested"
        if len(set(map(study.tested_on, rows))) > 1:
            yield f"{at}: its rows have different --data.test_classes"
        for whole in (False, True):
            budgets = [study.budget(row, whole=whole) for row in rows]
            if study.choice.equal_budget and len(set(budgets)) > 1:
                yield f"{at}: its rows choose from unequal numbers of settings, {budgets}; see choice.equal_budget"
