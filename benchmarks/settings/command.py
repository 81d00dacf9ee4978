"""Reads the settings of one run from a command line."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Self

import jsonargparse

from benchmarks.console.arguments import command_parser, user_path
from benchmarks.console.printing import printable
from benchmarks.settings.class_paths import DESCRIBED, resolved
from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.experiment import Experiment, WeightedLoss
from benchmarks.settings.recipe_files import read_entry
from benchmarks.settings.trusted import TRUST, trust
from benchmarks.settings.types import ClassSpec
from benchmarks.settings.yaml_files import load_yaml, misread, read_yaml

DEFAULT_RECIPE = "glyphs/demo/binomial"

GROUPS = ("data", "model", "optimization", "evaluation")
"""Settings that hold mappings."""

WHOLE = {"losses": "[{loss: {class_path: ..., init_args: ...}, weight: ...}]"}
WHOLE |= {key: "{class_path: ..., init_args: ...}" for key in DESCRIBED if key not in WHOLE}
"""Settings that are given as a whole, and how they are written."""

UNTYPED = ("model.trunk_args", "optimization.overrides")
"""Settings that hold values of any type."""


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    experiment: Experiment
    output: Path | None  # as it was asked for; the experiment has a default
    recipe: str | None  # the entry of the training
    resume: bool
    trusted: tuple[str, ...]  # modules that are neither ours nor those that we build on

    @property
    def config(self) -> dict[str, Any]:
        """All settings; classes in them as they are described."""
        return self.experiment.config() | {"output": self.output and str(self.output)}

    def resolved(self) -> Self:
        """The same command, with every default of every class in its settings."""
        return replace(self, experiment=resolved(self.experiment))


def parse(argv: Sequence[str]) -> Command:
    """Read the recipe, then `--config` files in their order, then options; later sources override earlier ones.

    Without a recipe, files and options change `DEFAULT_RECIPE`. A label holds for the losses and the miner of its
    source and of those before it: others are named after their classes. Modules that the command line trusts are
    trusted from now on.
    """
    first, parser = _parsers()
    try:
        given, options = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    trust(given.trust)
    entry = read_entry(DEFAULT_RECIPE if given.recipe is None else given.recipe)
    recipe = entry.training if given.recipe or not given.config else None
    layers = [entry.settings, *map(read_yaml, given.config)]
    for layer in layers:
        if ours := [name for name in layer if name in given]:
            raise ConfigError(
                f"{ours[0]}: belongs on the command line, not into a file of settings"
            )
        _check_values("", layer)
    _check_options(options)
    stages: list[Any] = [None]  # the settings after each layer
    try:
        for layer in layers:
            stages.append(parser.parse_object(layer, stages[-1]))
        settings = parser.parse_args(options, stages[-1]) if options else stages[-1]
    except (argparse.ArgumentError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(_line(error, parser)) from error
    named = stages[max(number for number, layer in enumerate(layers, 1) if "label" in layer)]
    is_given = any(re.match("--label(=|$)", option) for option in options)
    if not is_given and any(named[part] != settings[part] for part in ("losses", "miner")):
        settings.label = _label(settings.losses, settings.miner)
    experiment = Experiment(**vars(parser.instantiate(settings)))
    asked = experiment.output
    if asked is None:
        stem = recipe.replace("/", "-") if recipe else given.config[-1].stem
        name = _name(experiment, stem, stages[1 if recipe else -1])
        experiment.output = Path("runs") / f"{name}-seed{experiment.seed}"
    return Command(experiment, asked, recipe, given.resume, tuple(given.trust))


def _check_values(key: str, value: Any) -> None:
    """Refuse texts that are none in settings of any type: the parser would make values of some of them."""
    if key.startswith(UNTYPED):
        if (fault := next(misread(key, value), None)) is not None:
            raise ConfigError(fault)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _check_values(f"{key}.{name}".lstrip("."), inner)
    elif key in GROUPS or (key == "model.ensemble" and value is not None):
        raise ConfigError(f"{key}: expected a mapping of settings, got {value!r}")


def _check_options(options: Sequence[str]) -> None:
    """Refuse values that are not strict YAML, of which the parser tells no reason or makes numbers."""
    name = ""
    for value in options:
        if value.startswith("--"):
            name, equals, value = value.partition("=")
            for key, form in WHOLE.items():
                if re.match(rf"--{key}(\+?\.|\[)", name):
                    raise ConfigError(
                        f"{name.removeprefix('--')}: {key} is given as a whole; write --{key} '{form}'"
                    )
            if not equals:
                continue
        key = name.removeprefix("--")
        if (
            key in (*GROUPS, "model.ensemble")
            or key.startswith(UNTYPED)
            or value.lstrip().startswith(("[", "{"))
        ):
            try:
                content = load_yaml(value)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
            _check_values(key, content)


@cache
def _parsers() -> tuple[argparse.ArgumentParser, jsonargparse.ArgumentParser]:
    """The parser of what may not stand in a file, and that of the settings."""
    settings = jsonargparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        add_help=False,
        exit_on_error=False,
        allow_abbrev=False,
        parser_mode="strict",
    )
    settings.add_class_arguments(Experiment)
    text = "Train, test and report one experiment; --SETTING VALUE changes a setting below."
    first = command_parser("run", text)
    first.prog = "python benchmarks/run.py"
    first.exit_on_error, first.epilog = False, settings.format_help()
    text = "an entry of benchmarks/recipes; --list shows them"
    first.add_argument("--recipe", metavar="PAPER/TABLE/ROW", help=text)
    text = "a YAML file of settings; repeatable"
    first.add_argument("--config", type=user_path, action="append", default=[], help=text)
    first.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    first.add_argument("--trust", metavar="MODULE", action="append", default=[], help=TRUST)
    first.add_argument("--print_config", action="store_true", help="print every default, and exit")
    return first, settings


def _name(experiment: Experiment, stem: str, described: jsonargparse.Namespace) -> str:
    """The recipe's or file's name if dataset, trunk and label are those described there; else these."""
    data, trunk, label = experiment.data, experiment.model.trunk, experiment.label
    before = [described[key] for key in ("data.dataset", "model.trunk", "label")]
    if before == [data.dataset, trunk, label]:
        return stem
    images = data.root.resolve().name if data.dataset == "folder" else data.dataset
    if data.table is not None:
        images = data.table.stem
    return re.sub(r"[^\w.]+", "-", f"{images}-{trunk}-{label}").strip("-.")[:100]


def _label(losses: Sequence[WeightedLoss], miner: ClassSpec | None) -> str:
    """Name of a method that no recipe names, e.g. "HORDELoss(ContrastiveLoss) + JRSRegularizer, MyMiner"."""
    terms = " + ".join(_class_name(term.loss.description) for term in losses)
    return printable(terms if miner is None else f"{terms}, {_class_name(miner.description)}")


def _class_name(description: Mapping[str, Any]) -> str:
    """The class's name, with those of the losses inside it."""
    name = str(description.get("class_path")).rpartition(".")[2]
    arguments = description.get("init_args")
    inner = [
        _class_name(value)
        for argument, value in (arguments.items() if isinstance(arguments, Mapping) else ())
        if argument.endswith("loss") and isinstance(value, Mapping)
    ]
    return f"{name}({', '.join(inner)})" if inner else name


def _line(error: Exception, parser: jsonargparse.ArgumentParser) -> str:
    """The parser's message; for an unknown setting, with the one that may be meant."""
    line = one_line(error)
    unknown = re.findall(
        r"(?:unrecognized arguments: --|Group '|option '|^Option ')([\w.-]+)", line
    )
    group, _, name = ".".join(unknown).rpartition(".")
    keys = [*parser.get_defaults().keys()]  # of a namespace
    known = {key.rpartition(".")[2]: key for key in keys if key.startswith(group)}
    close = get_close_matches(name, known, n=1)
    return f"{line}; did you mean {known[close[0]]}?" if close else line
