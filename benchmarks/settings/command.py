"""Reads the settings of one run from a command line."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import jsonargparse
import yaml

from benchmarks.settings.data import Data
from benchmarks.settings.differences import flat, without_former
from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.experiment import Experiment, Model
from benchmarks.settings.recipe_files import GROUPS, read_entry
from benchmarks.settings.trusted import TRUST, trust
from benchmarks.settings.yaml_files import dump, read_yaml

DEFAULT_RECIPE = "glyphs/demo/binomial"

ON_THE_COMMAND_LINE = ("recipe", "resume", "trust", "config", "print_config")
"""Options that may not stand in a file."""

REFUSALS = (argparse.ArgumentError, RecursionError, ValueError)
"""The parser's errors."""


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Args:
        config: All settings; classes in them as they were described.
        recipe: The entry of the training; see `recipe_files.Entry`.
        trusted: Modules of these classes that are neither ours nor those that we build on.
    """

    experiment: Experiment
    config: dict[str, Any]
    recipe: str | None
    resume: bool
    trusted: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> Command:
    """Read the recipe, then `--config` files in their order, then options; later sources override earlier ones.

    Without a recipe, files and options change `DEFAULT_RECIPE`. Modules that the command line trusts are trusted
    from now on.

    Raises:
        ConfigError: unless the settings describe a complete, known and consistent experiment.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--recipe")
    first.add_argument("--config", type=Path, action="append", default=[])
    first.add_argument("--resume", action="store_true")
    first.add_argument("--trust", action="append", default=[])
    try:
        files, options = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    trust(files.trust)
    recipe = files.recipe or (None if files.config else DEFAULT_RECIPE)
    entry = read_entry(recipe or DEFAULT_RECIPE)
    if recipe is not None:
        recipe = entry.training
    layers = [entry.settings, *(without_former(read_yaml(path)) for path in files.config)]
    for layer in layers:
        for name, value in layer.items():
            if name in ON_THE_COMMAND_LINE:
                raise ConfigError(
                    f"{name}: belongs on the command line, not into a file of settings"
                )
            if name in GROUPS and not isinstance(value, Mapping):
                raise ConfigError(f"{name}: expected a mapping of settings, got {value!r}")
    parser = _parser()
    parsed = _parsed(parser, layers, options)
    for name in ON_THE_COMMAND_LINE:
        parsed.pop(name, None)
    config = yaml.safe_load(parser.dump(parsed, skip_unset=False))
    _refuse_null(Experiment, config)
    try:
        built = parser.instantiate(parsed)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(one_line(error)) from error
    experiment = Experiment(**{name: built[name] for name in Experiment.__dataclass_fields__})
    _plain(experiment)
    if experiment.output is None:
        stem = recipe.replace("/", "-") if recipe else files.config[-1].stem
        name = _name(experiment, stem, layers[:1] if recipe else layers)
        experiment.output = Path("runs") / f"{name}-seed{experiment.seed}"
    return Command(experiment, config, recipe, files.resume, tuple(files.trust))


@cache
def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="benchmarks/run.py",
        usage="%(prog)s [--recipe PAPER/TABLE/ROW] [--config FILE.yaml]\n"
        "           [--resume] [--SETTING VALUE ...]",
        description="Train, test and report one experiment.",
        exit_on_error=False,
        allow_abbrev=False,
        parser_mode="strict",
        print_config=None,  # jsonargparse's own option knows no defaults of classes
    )
    parser.add_argument(
        "--recipe",
        metavar="PAPER/TABLE/ROW",
        help="an entry of benchmarks/recipes; --list shows them",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--trust", metavar="MODULE", help=TRUST)
    parser.add_argument("--print_config", action="store_true", help="print every default, and exit")
    parser.add_argument("--config", action="config", help="a YAML file of settings; repeatable")
    parser.add_class_arguments(Experiment)
    return parser


def _parsed(
    parser: jsonargparse.ArgumentParser, layers: Sequence[dict[str, Any]], options: Sequence[str]
) -> jsonargparse.Namespace:
    """Parse all settings together; a ConfigError has a line for each wrong one."""
    given = [f"--config={dump(layer)}" for layer in layers]
    try:
        return parser.parse_args([*given, *options])
    except REFUSALS as error:  # the first
        first = error
    faults = []
    for arguments in _one_by_one(layers[1:], options):
        try:
            parser.parse_args([given[0], *arguments])
        except REFUSALS as error:
            faults.append(_line(error, parser))
    raise ConfigError(*dict.fromkeys(faults or [_line(first, parser)])) from first


def _one_by_one(
    layers: Sequence[dict[str, Any]], options: Sequence[str]
) -> Iterator[Sequence[str]]:
    for layer in layers:
        for name, value in layer.items():
            parts = [{inner: value[inner]} for inner in value] if name in GROUPS else [value]
            yield from ([f"--config={dump({name: part})}"] for part in parts)
    starts = [i for i, word in enumerate(options) if word.startswith("--") or i == 0]
    for start, end in pairwise([*starts, len(options)]):
        yield options[start:end]


def _name(experiment: Experiment, stem: str, described: Sequence[Mapping[str, Any]]) -> str:
    """The recipe's or file's name if dataset, trunk and label are those described there; else these."""
    before = {"data.dataset": Data.dataset, "model.trunk": Model.trunk}
    for layer in described:
        before |= flat(layer)
    data, trunk, label = experiment.data, experiment.model.trunk, experiment.label
    if (data.dataset, trunk, label) == tuple(
        map(before.get, ("data.dataset", "model.trunk", "label"))
    ):
        return stem
    images = data.root.resolve().name if data.dataset == "folder" else data.dataset
    return re.sub(r"[^\w.]+", "-", f"{images}-{trunk}-{label}").strip("-.")[:100]


UNKNOWN = re.compile(
    r"unrecognized arguments: --([\w.-]+)|Group '([\w.]+)' does not accept option '([\w-]+)'|"
    r"Option '([\w.-]+)' is not accepted"
)
"""jsonargparse's messages on an unknown setting."""


def _line(error: Exception, parser: argparse.ArgumentParser) -> str:
    """The parser's message; of an unknown setting with the one that may be meant."""
    line = one_line(error)
    if not (found := UNKNOWN.search(line)):
        return line
    names = parser._option_string_actions  # there is no public way
    known = [name.removeprefix("--") for name in names]
    close = get_close_matches(".".join(filter(None, found.groups())), known, n=1)
    return f"{line}; " + (f"did you mean {close[0]}?" if close else "--help lists the settings")


def _refuse_null(described: Any, config: Mapping[str, Any], prefix: str = "") -> None:
    for entry in fields(described):
        value, key = config.get(entry.name), prefix + entry.name
        if is_dataclass(entry.type) and isinstance(value, Mapping):
            _refuse_null(entry.type, value, f"{key}.")
        elif value is None and type(None) not in get_args(entry.type):
            raise ConfigError(f"{key}: expected a value, got null; leave it out for the default")


def _plain(value: Any) -> Any:
    """Plain Python numbers: those with a range have classes of their own, which numpy takes for float64."""
    if is_dataclass(value):
        for entry in fields(value):
            setattr(value, entry.name, _plain(getattr(value, entry.name)))
    elif isinstance(value, list):
        return [_plain(item) for item in value]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value
