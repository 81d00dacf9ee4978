"""YAML of settings: read strictly and within limits, and written so that it reads back as it was."""

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from benchmarks.settings.errors import ConfigError, one_line

SIZE = 2**18  # characters of a file
MOST, LONGEST, DEEPEST, LARGEST = 5_000, 100, 50, 10**308
"""Limits on values, entries of a list, levels and numbers, far above what settings have.

The parser's time grows with the square of a list's length.
"""


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, and reads 1e-5 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for described, _ in node.value:
            if (key := self.construct_object(described, deep=True)) in seen:
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
    """Read YAML text with `StrictLoader`.

    Raises:
        ValueError: if the text is not valid YAML, or too large.
    """
    if len(text) > SIZE:
        raise ValueError(f"expected settings, got more than {SIZE:,} characters")
    try:
        value = yaml.load(text, StrictLoader)
        _check_size(value)
        return value
    except Exception as error:  # a tag may declare any text a number, a date or binary
        raise ValueError(one_line(error)) from error


def _check_size(value: Any) -> None:
    """Raise a ValueError for more than settings have; a value that is written once and used again counts again."""
    level, count = [value], 0
    for _ in range(DEEPEST):
        count += len(level)
        if count > MOST:
            raise ValueError(f"more than {MOST:,} values, aliases written out")
        for one in level:
            if isinstance(one, list) and len(one) > LONGEST:
                raise ValueError(f"expected a list of at most {LONGEST}, got one of {len(one)}")
            if isinstance(one, int) and abs(one) >= LARGEST:
                raise ValueError("expected a number, got one of more than 308 digits")
        level = [inner for one in level for inner in _entries(one)]
        if not level:
            return
    raise ValueError(f"more than {DEEPEST} levels")


def _entries(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


jsonargparse.set_loader("strict", load_yaml, exceptions=(ValueError,))


_load_once = cache(load_yaml)  # every command reads the recipes several times


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigError: if the file is missing, unreadable, or holds something else.
    """
    try:
        with path.open() as file:
            content = deepcopy(_load_once(file.read(SIZE + 1)))
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
