"""Reads the settings of one run from a command line."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import jsonargparse
import yaml

from benchmarks.settings.data import Data
from benchmarks.settings.differences import flat
from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.experiment import Experiment, Model
from benchmarks.settings.recipe_files import (
    GROUPS,
    MOST,
    StrictLoader,
    TooLargeError,
    dump,
    load_yaml,
    read_entry,
    read_yaml,
)
from benchmarks.settings.trusted import TRUST, trust

DEFAULT_RECIPE = "glyphs/demo/binomial"

ON_THE_COMMAND_LINE = ("recipe", "resume", "trust", "config", "print_config")
"""Options that may not stand in a file."""

LONGEST = 100  # list that is a setting, such as the K of recall


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


# ---------------------------------------------------------------------------------------------- parse


def parse(argv: Sequence[str]) -> Command:
    """Read the recipe, then `--config` files in their order, then options; later sources override earlier ones.

    Without a recipe, files and options change `DEFAULT_RECIPE`. Modules that the command line trusts are trusted
    from now on.

    Raises:
        ConfigError: unless the settings describe a complete, known and consistent experiment.
    """
    for argument in argv:  # a record cannot hold it
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(f"{argument!a}: is not UTF-8; write it in UTF-8")
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
    layers = [entry.settings]
    layers += [read_yaml(path) for path in files.config]
    for layer in layers:
        for name in ON_THE_COMMAND_LINE:
            if name in layer:
                raise ConfigError(
                    f"{name}: belongs on the command line, not into a file of settings"
                )
        _check_size(layer)
    options = list(_with_groups(options))
    for before, option in pairwise(["", *options]):
        name, _, text = option.partition("=")
        _check_size(text or name, name if text else before)

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
    try:
        parsed = parser.parse_args([f"--config={dump(layer)}" for layer in layers] + options)
    except (argparse.ArgumentError, RecursionError, ValueError) as error:
        line = one_line(error)
        raise ConfigError(f"{line}{_did_you_mean(line, parser)}") from error
    for name in ON_THE_COMMAND_LINE:
        parsed.pop(name, None)
    config = yaml.safe_load(parser.dump(parsed, skip_unset=False))
    _refuse_null(Experiment, config)
    try:
        built = parser.instantiate(parsed)
    except (TypeError, ValueError) as error:  # such as a number for a group of settings
        raise ConfigError(one_line(error)) from error
    experiment = Experiment(**{name: built[name] for name in Experiment.__dataclass_fields__})
    _plain(experiment)
    if experiment.output is None:
        stem = recipe.replace("/", "-") if recipe else files.config[-1].stem
        name = _name(experiment, stem, layers[:1] if recipe else layers)
        experiment.output = Path("runs") / f"{name}-seed{experiment.seed}"
    return Command(experiment, config, recipe, files.resume, tuple(files.trust))


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
    return re.sub(r"[^\w.]+", "-", f"{images}-{trunk}-{label}").strip("-.")[:LONGEST]


UNKNOWN = re.compile(
    r"unrecognized arguments: --([\w.-]+)|Group '([\w.]+)' does not accept option '([\w-]+)'|"
    r"Option '([\w.-]+)' is not accepted"
)
"""jsonargparse's messages on an unknown setting."""


def _did_you_mean(message: str, parser: argparse.ArgumentParser) -> str:
    if not (found := UNKNOWN.search(message)):
        return ""
    known = [
        name.removeprefix("--") for name in parser._option_string_actions
    ]  # there is no public way
    close = get_close_matches(".".join(filter(None, found.groups())), known, n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists the settings"


def _with_groups(options: Sequence[str]) -> Iterator[str]:
    """Options, with `--data FILE` and `--data {...}` as `--config`: the parser takes FILE for a class name."""
    words = iter(options)
    for word in words:
        name, given, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in GROUPS:  # the value may be named data, too
            yield word
            continue
        text = text if given else next(words, "")
        try:
            content = load_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--{name}: {one_line(error)}") from error
        if isinstance(content, str):
            content = read_yaml(Path(text))
        _check_size({name: content})
        yield f"--config={dump({name: content})}"


def _check_size(value: Any, key: str = "", longest: int = LONGEST) -> None:
    """Refuse values that would keep the parser busy: its time grows with the square of a list's length.

    The parser reads any text as YAML, and where settings belong, as the name of a file.
    """
    if isinstance(value, Mapping):
        longest = MOST if "class_path" in value else longest  # the parser leaves it as it is
        for name, inner in value.items():
            if name in GROUPS and not key and not isinstance(inner, Mapping):
                raise ConfigError(f"{name}: expected a mapping of settings, got {inner!r}")
            _check_size(inner, f"{key}.{name}".removeprefix("."), longest)
    elif isinstance(value, list):
        if len(value) > longest:
            raise ConfigError(
                f"{key}: expected a list of at most {longest}, got one of {len(value)}"
            )
        for inner in value:
            _check_size(inner, key, longest)
    elif isinstance(value, (int, str)) and re.fullmatch(r"[-+]?\d{309,}", str(value)):
        raise ConfigError(f"{key}: expected a number, got one of more than 308 digits")
    elif isinstance(value, str):
        try:
            yaml.compose(value, StrictLoader)
        except TooLargeError as error:
            raise ConfigError(f"{key}: {one_line(error)}") from error
        except yaml.YAMLError:
            pass  # plain text


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
