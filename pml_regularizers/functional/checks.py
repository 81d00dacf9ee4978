"""Range checks of arguments, with one wording for all losses."""

from collections.abc import Iterable
from numbers import Real
from typing import Any


def at_least(name: str, value: Any, least: float) -> None:
    """Raise ValueError unless the value is a number >= least; NaN and booleans are refused too."""
    if isinstance(value, bool) or not (isinstance(value, Real) and float(value) >= least):
        raise ValueError(f"{name}: expected at least {least}, got {value!r}")


def one_of(name: str, word: object, words: Iterable[object]) -> None:
    """Raise ValueError unless the word is one of `words`."""
    words = list(words)
    if word not in words:
        raise ValueError(
            f"{name}: expected one of {', '.join(str(known) for known in words)}; got {word!r}"
        )
