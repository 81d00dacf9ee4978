"""A class whose default has been changed."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.building import class_paths


@contextmanager
def changed_default(cls: type, name: str, value: Any) -> Iterator[None]:
    """The class with another default of a positional argument, as its next release might have it."""
    function: Any = cls.__init__
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = dict(zip(names[-len(function.__defaults__) :], function.__defaults__, strict=True))
    assert defaults[name] != value
    others = tuple((defaults | {name: value}).values())
    class_paths._arguments.cache_clear()
    try:
        with mock.patch.object(function, "__defaults__", others):
            yield
    finally:
        class_paths._arguments.cache_clear()
