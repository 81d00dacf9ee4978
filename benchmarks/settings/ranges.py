"""Types of numbers with a range, which the parser reads as plain Python numbers."""

import operator
import os
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from jsonargparse.typing import register_type

# jsonargparse's own serializer is str, which makes a text of null.
register_type(Path, os.fspath, Path, type_check=isinstance)


def _number(name: str, kind: type, least: float, limit: float = 2**31) -> Any:
    """A type of the integers from `least` on, or of the numbers above it; all are below the limit.

    The limit is that of any count: no machine has more, and torch would overflow.
    """
    what, sign, above = {
        int: ("an integer", ">=", operator.ge),
        float: ("a finite number", ">", operator.gt),
    }[kind]

    low, high = f" {sign}{least}" * (least > -inf), f" and <{limit}" * (limit < inf)

    def read(_: type, value: Any) -> Any:
        with suppress(OverflowError, TypeError, ValueError):
            number = kind(value)
            inside = above(number, least) and number < limit
            if inside and number == float(value) and not isinstance(value, bool):
                return number
        raise ValueError(f"expected {what}{low}{high}, got {value!r}")

    made = type(name, (kind,), {"__new__": read})
    register_type(made, serializer=kind)
    return made


NonNegativeInt = _number("Count", int, 0)
PositiveInt = _number("AtLeast1", int, 1)
AtLeast2 = _number("AtLeast2", int, 2)
Pixels = _number("Pixels", int, 8, 2**15)
Seed = _number("Seed", int, 0, 2**32)
Points = _number("Points", float, 0, 100)
Rate = _number("Rate", float, 0, inf)
Finite = _number("Finite", float, -inf, inf)
