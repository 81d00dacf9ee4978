"""YAML of settings: read strictly, and written so that it reads back as it was."""

import pickle
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from benchmarks.console.arguments import DECIMAL, INTEGER
from benchmarks.settings.errors import ConfigError, one_line


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, keys that are no text, and numbers that readers of YAML disagree on.

    A number is in decimal digits, such as 10, 1e-5 or .inf. YAML 1.1 reads 010 as 8 and 1:30 as 90, YAML 1.2 as 10
    and as text: such forms are refused. A date is text. No tag makes another value of a text, and no mapping is
    merged into another.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(TAG)
        if kind == "merge":
            raise _error(node, "merging by << is not read; write the keys out")
        if node.tag != OTHER_NUMBER and (kind not in READ or kind == node.tag):
            problem = f"could not determine a constructor for the tag {node.tag!r}; leave it out"
            raise _error(node, problem)
        pattern = NUMBERS.get(node.tag)
        other = pattern is not None and not re.fullmatch(pattern, node.value, re.ASCII)
        if other or node.tag == OTHER_NUMBER:
            problem = f"expected a number in decimal digits, got {node.value}; quote a text"
            raise _error(node, problem)
        return super().construct_object(node, deep=deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in [self.construct_object(key, deep=True) for key, _ in node.value]:
            if type(key) not in (str, int):
                raise _error(node, f"key {key!r}: expected text; quote it")
            if str(key) in seen:
                raise _error(node, f"key {key!r} appears twice")
            seen.add(str(key))
        return dict(super().construct_mapping(node, deep=True))


class StrictDumper(yaml.SafeDumper):
    """YAML dumper for `StrictLoader`: it quotes texts that would be read as numbers, such as "1e5"."""


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


TAG, OTHER_NUMBER = "tag:yaml.org,2002:", "!number"
READ = ("bool", "float", "int", "map", "null", "seq", "str")
NUMBERS = {
    f"{TAG}int": INTEGER,
    f"{TAG}float": rf"{DECIMAL}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    OTHER_NUMBER: (
        r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?[\d_]+)?"  # 010, 1_000
        r"|[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?"  # base 60
        r"|[-+]?0[bBoOxX][\da-fA-F_]+"
    ),
}
for either in (StrictLoader, StrictDumper):
    either.yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.removeprefix(TAG) in ("bool", "merge", "null")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in NUMBERS.items():
        either.add_implicit_resolver(
            tag, re.compile(rf"(?:{pattern})\Z", re.ASCII), list("-+.0123456789")
        )


def load_yaml(text: str) -> Any:
    """Read YAML text with `StrictLoader`; a ValueError of one line if it is not valid."""
    return pickle.loads(_load_once(text))


@lru_cache(maxsize=4096)  # a command reads recipes and values many times
def _load_once(text: str) -> bytes:
    """The content as a pickle, of which each reader has a copy of its own."""
    try:
        return pickle.dumps(yaml.load(text, StrictLoader))
    except Exception as error:  # a tag may declare any text a number, a date or binary
        raise ValueError(one_line(error)) from error


jsonargparse.set_loader("strict", load_yaml, exceptions=(ValueError,))


def is_misread(text: str) -> bool:
    """True for a text whose letters are another value in YAML, such as "no", "null" or "1e-3"."""
    try:
        value = yaml.load(text, StrictLoader)
    except yaml.YAMLError:
        return re.fullmatch(NUMBERS[OTHER_NUMBER], text, re.ASCII) is not None
    quoted = text.startswith(("'", '"')) and value != text
    return bool(text.strip()) and (quoted or not isinstance(value, str | list | dict))


def misread(key: str, value: Any) -> Iterator[str]:
    """A line on each text in a setting of any type that is no text to YAML, on NaN, and on a key that is no text.

    Whatever takes the setting would read "no" as true.
    """
    if isinstance(value, str) and is_misread(value):
        yield f"{key}: expected a value, got the text {value!r}; write it without quotes"
    elif value != value:
        yield f"{key}: expected a number, got {value!r}"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                yield f"{key}: expected names, got {name!r}"
            yield from misread(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from misread(f"{key}[{index}]", inner)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of a mapping; a ConfigError if it is missing, unreadable, or holds something else."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    return content


def dump(config: Mapping[str, Any]) -> str:
    """Settings as YAML for `--config`."""
    return str(yaml.dump(dict(config), Dumper=StrictDumper, sort_keys=False))
