"""Types of settings: numbers with a range, which the parser reads as plain Python numbers, paths and classes."""

import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from typing import Any

from jsonargparse.typing import register_type

from benchmarks.console.arguments import DECIMAL, user_path

# jsonargparse's own serializer is str, which makes a text of null.
register_type(Path, os.fspath, user_path, (argparse.ArgumentTypeError, TypeError), isinstance)


def _number(name: str, kind: type, expected: str, inside: Callable[[Any], bool]) -> Any:
    def read(_: type, value: Any) -> Any:
        with suppress(OverflowError, TypeError, ValueError):
            if isinstance(value, str) and not re.fullmatch(DECIMAL, value):
                raise ValueError
            number = kind(value)
            if inside(number) and number == float(value) and not isinstance(value, bool):
                return number
        raise ValueError(f"expected {expected}, got {value!r}")

    made = type(name, (kind,), {"__new__": read})
    register_type(made, serializer=kind)
    return made


def _integer(name: str, least: int, limit: int = 2**31) -> Any:
    """Integers below the limit of any count: no machine has more, and torch would overflow."""
    return _number(name, int, f"an integer >={least} and <{limit}", lambda n: least <= n < limit)


NonNegativeInt = _integer("Count", 0)
PositiveInt = _integer("AtLeast1", 1)
AtLeast2 = _integer("AtLeast2", 2)
Pixels = _integer("Pixels", 8, 2**15)
Seed = _integer("Seed", 0, 2**32)
Points = _number("Points", float, "a finite number >0 and <100", lambda n: 0 < n < 100)
Rate = _number("Rate", float, "a finite number >0", lambda n: 0 < n < inf)
Finite = _number("Finite", float, "a finite number", isfinite)


class ClassSpec:
    """{class_path: dotted.path.of.a.Class, init_args: {its arguments}}, as it was written.

    The parser does not look inside: `build` checks it, once the sizes are known.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        if not isinstance(description, dict):
            raise ValueError(f"expected {{class_path: ..., init_args: ...}}, got {description!r}")
        self.description = description

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassSpec) and self.description == other.description


register_type(ClassSpec, serializer=lambda spec: spec.description, deserializer=ClassSpec)
