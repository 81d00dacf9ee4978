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

SIZE = 2**20  # characters of a file
MOST, LONGEST, DEEPEST, DIGITS = 5_000, 100, 50, 308
"""Limits on values, entries of a list, levels and digits of a number, far above what settings have.

The parser's time grows with the square of a list's length, and it reads any text as YAML, too.
"""


class TooLargeError(yaml.YAMLError):
    """Error: more than settings have."""


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and what is too large, and reads 1e-5 as a number."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._text, self._level, self._count = stream, 0, 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        before, is_alias = self._count, self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > DEEPEST:
            raise TooLargeError(f"more than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is None:
            return None
        # An alias inside the value that it stands for has no size yet, and no end.
        self._count += self._sizes.get(node, MOST) if is_alias else 1
        self._sizes.setdefault(node, self._count - before)
        if self._count > MOST:
            raise TooLargeError(f"more than {MOST:,} values, aliases written out")
        if isinstance(node, yaml.SequenceNode) and len(node.value) > LONGEST:
            raise TooLargeError(
                f"expected a list of at most {LONGEST}, got one of {len(node.value)}: "
                f"line {node.start_mark.line + 1}"
            )
        if isinstance(node, yaml.ScalarNode) and node.value != self._text:
            refuse_large(node.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", node.start_mark
                )
        return super().construct_mapping(node, deep=True)


def refuse_large(text: str) -> None:
    """Raise a TooLargeError if a text, read as YAML, is a number or a structure that is too large."""
    if len(text) > DIGITS and text.lstrip("+-").isdigit():
        raise TooLargeError(f"expected a number, got one of more than {DIGITS} digits")
    if re.search(r"[\[{*]", text):
        try:
            yaml.compose(text, StrictLoader)
        except TooLargeError:
            raise
        except yaml.YAMLError:
            pass  # plain text


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
        return yaml.load(text, StrictLoader)
    except Exception as error:  # a tag may declare any text a number, a date or binary
        raise ValueError(one_line(error)) from error


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
