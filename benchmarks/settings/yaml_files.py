"""YAML of settings: read strictly, and written so that it reads back as it was."""

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from benchmarks.settings.errors import ConfigError, one_line


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and reads 1e-5 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in [self.construct_object(key, deep=True) for key, _ in node.value]:
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=True)


class StrictDumper(yaml.SafeDumper):
    """YAML dumper for `StrictLoader`: it quotes texts that would be read as numbers, such as "1e5"."""


for either in (StrictLoader, StrictDumper):
    either.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def load_yaml(text: str) -> Any:
    """Read YAML text with `StrictLoader`; a ValueError of one line if it is not valid."""
    try:
        return yaml.load(text, StrictLoader)
    except Exception as error:  # a tag may declare any text a number, a date or binary
        raise ValueError(one_line(error)) from error


jsonargparse.set_loader("strict", load_yaml, exceptions=(ValueError,))


_load_once = cache(load_yaml)  # every command reads the recipes several times


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of a mapping; a ConfigError if it is missing, unreadable, or holds something else."""
    try:
        content = deepcopy(_load_once(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    return content


def dump(config: Mapping[str, Any]) -> str:
    """Settings as YAML for `--config`."""
    return yaml.dump(dict(config), Dumper=StrictDumper, sort_keys=False)
