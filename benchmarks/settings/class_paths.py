"""Objects built from `{class_path: ..., init_args: {...}}`, and such descriptions with all defaults filled in.

A class is imported if its module is trusted, and called if it is of the kind that its setting expects.
"""

import argparse
import importlib
import inspect
import json
import re
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import is_dataclass, replace
from functools import cache
from math import isnan
from operator import is_not
from pkgutil import resolve_name
from typing import Any, get_args

import jsonargparse

from benchmarks.console.printing import reason
from benchmarks.settings.errors import ConfigError, one_line
from benchmarks.settings.trusted import OURS, is_trusted
from benchmarks.settings.types import ClassSpec
from benchmarks.settings.yaml_files import misread

SIZES = ("num_classes", "in_channels", "embedding_size")

DESCRIBED = {
    "losses": ("a loss", "torch.nn:Module", SIZES),
    "miner": ("a miner", "pytorch_metric_learning.miners:BaseMiner", SIZES),
    "model.attention": ("a module", "torch.nn:Module", ("num_features",)),
    "optimization.optimizer": ("an optimizer", "torch.optim:Optimizer", ("params", "lr")),
    "optimization.scheduler": (
        "a scheduler",
        "torch.optim.lr_scheduler:LRScheduler",
        ("optimizer", "max_lr", "total_steps"),
    ),
}
"""Settings that describe classes: the kind, its base, and the arguments that the runner fills in there."""

UNTYPED = {inspect.Parameter.empty, Any, dict, list, tuple, "Any", "dict", "list", "tuple"}
"""Annotations that leave open what a text in the argument means."""

UNSAID = object()
"""Placeholder for a default that YAML cannot hold, such as a function, or that does not exist."""


def resolved(value: Any, key: str = "") -> Any:
    """An experiment, or a description, with every default of every class filled in; it builds the same objects.

    A null stays if the class does not say what it means; values that YAML cannot hold are left out.
    """
    place = next((place for place in DESCRIBED if key.startswith(place)), None)
    if isinstance(value, dict) and "class_path" in value and place is not None:
        *_, provided = DESCRIBED[place]
        cls, given, defaults = _read(value, key)
        said = {
            name: default
            for name, default in defaults.items()
            if default is not UNSAID and name not in provided
        }
        for name in getattr(cls, "completed", ()):
            if isinstance(said.get(name), dict) and isinstance(given.get(name), dict):
                given = given | {name: said[name] | given[name]}
        value = {"class_path": value["class_path"], "init_args": said | given}
    if isinstance(value, ClassSpec):
        return ClassSpec(resolved(value.description, key))
    if is_dataclass(value):
        return replace(value, **resolved(vars(value), key))  # type: ignore[type-var]
    if isinstance(value, dict):
        return {name: resolved(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, list):
        return [resolved(inner, f"{key}[{i}]") for i, inner in enumerate(value)]
    return value


def build(spec: Any, key: str, **provided: Any) -> Any:
    """Build the object that a description of a class stands for, and those inside it.

    Args:
        spec: `ClassSpec.description`.
        key: Its place in the settings, for messages.
        **provided: Arguments that the runner fills in for every class that takes them, unless they are given as
            null.

    Raises:
        ConfigError: for a class that is unknown, not trusted or of the wrong kind, and for an argument that is
            unknown, of a wrong type, or refused by the class itself.
    """
    cls, given, defaults = _read(spec, key)
    arguments = {}
    for name, value in given.items():
        where = f"{key}.init_args.{name}"
        if name in provided and value is not None:
            raise ConfigError(f"{where}: follows from the data and the model; leave it out")
        # Some classes refuse even their own default if it is passed.
        if value != defaults[name] or type(value) is not type(defaults[name]):
            arguments[name] = _with_objects(value, where, provided)
    # An object was checked when it was built.
    plain = {name: value for name, value in arguments.items() if value is given[name]}
    arguments |= _checked(cls, plain, defaults, key)
    # A null prevents filling in: MarginLoss(num_classes=None) has one boundary for all classes.
    filled = {name: provided[name] for name in provided.keys() & defaults.keys() - given.keys()}
    try:
        return cls(**filled, **arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {cls.__name__}: {reason(error)}") from error


def _read(spec: Any, key: str) -> tuple[type, dict[str, Any], dict[str, Any]]:
    """The class that a description names, the arguments that it gives, and all arguments with their defaults."""
    if not isinstance(spec, dict) or spec.keys() - {"init_args"} != {"class_path"}:
        raise ConfigError(f"{key}: expected {{class_path: ..., init_args: ...}}, got {spec!r}")
    given = {} if spec.get("init_args") is None else spec["init_args"]
    if not isinstance(given, dict):
        raise ConfigError(f"{key}.init_args: expected a mapping, got {given!r}")
    path, where = spec["class_path"], f"{key}.class_path"
    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        raise ConfigError(f"{where}: expected a path such as torch.optim.SGD, got {path!r}")
    module, _, name = path.rpartition(".")
    if not is_trusted(module):
        raise ConfigError(
            f"{where}: {path} is not imported, since importing a module runs it; if you trust it, add "
            f"--trust {module} to the command"
        )
    try:
        cls = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing runs the module
        line = f"{where}: cannot import {path!r} ({reason(error)})"
        lost = error.name if isinstance(error, ModuleNotFoundError) else None
        if lost not in OURS and f"{module}.".startswith(f"{lost}."):
            line += "; expected it in the current folder, or in one of PYTHONPATH"
        raise ConfigError(line) from error
    place = re.sub(r"^losses\[\d+\]\.loss$", "losses", key)
    # Inside the description of another class suit all kinds, and any class of ours or of a trusted module.
    inside = place not in DESCRIBED
    kinds, bases, _ = zip(*(DESCRIBED.values() if inside else [DESCRIBED[place]]), strict=True)
    suits = isinstance(cls, type) and (
        issubclass(cls, tuple(map(resolve_name, bases)))
        or (inside and is_trusted(cls.__module__, ["pml_regularizers"]))
    )
    if not suits:
        raise ConfigError(f"{where}: expected {' or '.join(kinds)}, got {path!r}")
    try:
        defaults = _defaults(cls, given)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {path} has no readable list of arguments ({reason(error)})"
        ) from error
    if unknown := [name for name in given if name not in defaults]:
        raise ConfigError(
            f"{key}.init_args.{unknown[0]}: {name} takes no such argument; it takes {', '.join(defaults)}"
        )
    return cls, given, defaults


def _defaults(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """{argument: its default, or UNSAID}, including the arguments of the bases.

    The method `get_default_NAME` of PML's classes gives the meaning of null.
    """
    defaults = {name: _said(default) for name, (_, default) in _arguments(cls).items()}
    for name in [name for name, default in defaults.items() if default is None]:
        if (meant := getattr(cls, f"get_default_{name}", None)) is not None:
            with suppress(Exception, SystemExit):  # the method may need more than arguments
                blank = cls.__new__(cls)
                vars(blank).update({**defaults, **given})
                said = _said(meant(blank))
                defaults[name] = None if said is UNSAID else said
    return defaults


@cache
def _arguments(cls: type) -> dict[str, tuple[Any, Any]]:
    """{argument: (its annotation, its default in the signature, or UNSAID)}, of the nearest base that names it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    names = parser.add_class_arguments(cls, fail_untyped=False)
    bases: list[Any] = [*cls.__mro__]
    parameters = ChainMap(*(dict(inspect.signature(base.__init__).parameters) for base in bases))
    unnamed = inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY, default=None)
    named = {name: parameters.get(name, unnamed) for name in names}
    return {
        name: (p.annotation, UNSAID if p.default is p.empty else parser.get_default(name))
        for name, p in named.items()
    }


def _said(value: Any) -> Any:
    """A value as YAML holds it (a module's description in its place); UNSAID if YAML cannot hold it."""
    try:
        return json.loads(json.dumps(value, default=_description))
    except (TypeError, ValueError, AttributeError):
        return UNSAID


def _description(module: Any) -> dict[str, Any]:
    """The description of a module that has its arguments as attributes."""
    from torch import nn  # not needed for a misspelt setting

    if not isinstance(module, nn.Module):
        raise TypeError
    cls: Any = type(module)
    arguments = {name: getattr(module, name) for name in _arguments(cls)}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}


def _with_objects(value: Any, key: str, provided: Mapping[str, Any]) -> Any:
    """A value with an object in place of each description of a class; the value itself if there is none."""
    if isinstance(value, dict) and "class_path" in value:
        return build(value, key, **provided)
    if isinstance(value, dict):
        inner = [_with_objects(item, f"{key}.{name}", provided) for name, item in value.items()]
        changed = any(map(is_not, inner, value.values()))
        return dict(zip(value, inner, strict=True)) if changed else value
    if isinstance(value, list):
        inner = [_with_objects(item, f"{key}[{i}]", provided) for i, item in enumerate(value)]
        return inner if any(map(is_not, inner, value)) else value
    return value


def _checked(
    cls: type, given: Mapping[str, Any], defaults: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Check typed arguments by their type, and untyped scalars by the type of their default.

    Returns:
        The arguments; a text that the type makes an object, such as a path, as that object.
    """
    try:
        parsed = _parser(cls, frozenset(defaults) - set(given)).parse_object(deepcopy(dict(given)))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{key}.init_args: {one_line(error)}") from error
    annotations, checked = _arguments(cls), {}
    for name, value in given.items():
        where, default, annotation = f"{key}.init_args.{name}", defaults[name], annotations[name][0]
        typed = UNTYPED.isdisjoint((annotation, *get_args(annotation)))
        scalar = isinstance(default, (bool, int, float, str))
        numbers = {type(value), type(default)} == {int, float}
        if scalar and not typed and type(value) is not type(default) and not numbers:
            raise ConfigError(
                f"{where}: expected {type(default).__name__} like the default {default!r}, got {value!r}"
            )
        if typed:
            checked[name] = _typed(value, parsed[name], where)
        elif not isinstance(default, str) and (fault := next(misread(where, value), None)):
            raise ConfigError(fault)
    return checked


@cache
def _parser(cls: type, skipped: frozenset[str]) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, parser_mode="strict")
    parser.add_class_arguments(cls, fail_untyped=False, skip=set(skipped))
    return parser


def _typed(given: Any, parsed: Any, key: str) -> Any:
    """The argument, with what its type made of a text; refuses a text that was made a number, null or the like."""
    if isinstance(given, float) and isnan(given):
        raise ConfigError(f"{key}: expected a number, got {given!r}")
    if isinstance(given, str):
        if parsed is None or isinstance(parsed, (bool, int, float, list, tuple, dict)):
            raise ConfigError(
                f"{key}: expected {type(parsed).__name__}, got the text {given!r}; write it without quotes"
            )
        return parsed
    if isinstance(given, list) and isinstance(parsed, (list, tuple)):
        pairs = enumerate(zip(given, parsed, strict=True))
        return [_typed(inner, made, f"{key}[{i}]") for i, (inner, made) in pairs]
    if isinstance(given, dict) and isinstance(parsed, Mapping):
        return {name: _typed(inner, parsed[name], f"{key}.{name}") for name, inner in given.items()}
    return parsed if isinstance(parsed, (set, frozenset)) else given
