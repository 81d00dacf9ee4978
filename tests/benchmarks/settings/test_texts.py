"""A quoted value in the arguments of a class is no other value: it is refused, or it is text."""

import enum
from collections.abc import Callable
from copy import deepcopy
from math import nan
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from benchmarks.settings.class_paths import build
from benchmarks.settings.errors import ConfigError


class Colour(enum.Enum):
    RED = 1


class Typed(nn.Module):
    """Arguments of types that jsonargparse makes of a text, and of none."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        flag: bool = False,
        count: int = 1,
        rate: float = 1.0,
        rate_or_word: float | str = 1.0,
        one_of: Literal["a", 1] = "a",
        pair: tuple[float, float] = (0.1, 0.2),
        counts: list[int] | None = None,
        flags: dict[str, bool] | None = None,
        maybe_word: str | None = None,
        anything: Any = None,
        path: Path | None = None,
        colour: Colour = Colour.RED,
        untyped=None,
        untyped_flag=False,
        untyped_rate=0.5,
    ) -> None:
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name != "self"}


def built(**arguments: Any) -> dict[str, Any]:
    """All arguments of a `Typed` that is built from these."""
    description = {"class_path": f"{__name__}.Typed", "init_args": arguments}
    return dict(build(description, "losses.x").given)


TEXTS = ("no", "Off", "true", "null", "~", "3", "1e-3", ".inf", "010", "1_0", "1:30", "'no'")
TAKES_TEXT = ("maybe_word", "rate_or_word", "path", "colour")


@pytest.mark.parametrize("name", [*Typed.__init__.__annotations__, "untyped", "untyped_flag"])
def test_a_text_is_no_other_value(name: str, trusting: Callable[..., None]) -> None:
    trusting(__name__)
    refused = 0
    for text in TEXTS:
        for value in (text, [text], {"a": text}):
            before = deepcopy(value)
            try:
                got = built(**{name: value})[name]
            except ConfigError as error:
                assert "losses.x.init_args" in str(error) and name in str(error)
                refused += 1
            else:
                assert name in TAKES_TEXT and got in (text, Path(text).expanduser()), (name, got)
            assert value == before
    assert refused >= 2 * len(TEXTS)


def test_what_has_its_type_is_handed_on(trusting: Callable[..., None]) -> None:
    trusting(__name__)
    given: dict[str, Any] = {
        **{"flag": True, "count": 3, "rate": 1e-3, "pair": [0.5, 1], "maybe_word": "010"},
        **{"anything": {"a": ["relu", True]}, "flags": {"a": False}, "counts": [1, 2]},
        **{"untyped": "relu", "untyped_rate": 2},
    }
    got = built(**given, path="x")
    assert {name: got[name] for name in given} == given
    assert got["path"] == Path("x")


@pytest.mark.parametrize("name", ["rate", "pair", "anything", "untyped_rate"])
def test_nan_is_no_number(name: str, trusting: Callable[..., None]) -> None:
    trusting(__name__)
    with pytest.raises(ConfigError, match=f"{name}.*: expected a number, got nan"):
        built(**{name: [0.5, nan] if name == "pair" else nan})
