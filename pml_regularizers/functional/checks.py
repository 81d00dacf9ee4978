"""Checks of arguments, with one wording for all losses, and what a loss inside another one offers."""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from pytorch_metric_learning.losses import MarginLoss, NormalizedSoftmaxLoss, ProxyNCALoss
from torch import Tensor, nn


class OwnArguments:
    """A base before PML's, which names our class for an unknown argument, and refuses a distance without a use."""

    def __init__(self, **kwargs: Any) -> None:
        try:
            super().__init__(**kwargs)
        except TypeError as error:
            _, unknown, name = str(error).partition("got an unexpected keyword argument ")
            if not unknown:
                raise
            known = ", ".join(inspect.signature(type(self)).parameters)
            raise TypeError(
                f"{type(self).__name__}: {unknown}{name}; it takes {known}: see its documentation"
            ) from None
        if kwargs.get("distance") is not None and self.get_default_distance() is None:  # type: ignore[attr-defined]
            raise ValueError(f"distance: {type(self).__name__} has no use for one; leave it out")


def whole_numbers(least: int = 1, **given: Any) -> None:
    """Raise ValueError unless all arguments are whole numbers >= least."""
    for name, x in given.items():
        if isinstance(x, bool) or not (isinstance(x, Integral) and int(x) >= least):
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {x!r}")


def number(name: str, value: Any, *, least: float = -inf, above: float = -inf) -> None:
    """Raise ValueError unless the value is a finite number >= least and > above."""
    real = isinstance(value, Real | Tensor) and not isinstance(value, bool)
    if not (real and least <= float(value) < inf and float(value) > above):  # NaN is neither
        limit = f" of at least {least}" if least > -inf else f" above {above}" * (above > -inf)
        raise ValueError(f"{name}: expected a number{limit}, got {value!r}")


def one_of(name: str, word: Any, words: Iterable[object]) -> Any:
    """The word; a ValueError unless it is one of `words`."""
    words = list(words)
    if word not in words:
        raise ValueError(
            f"{name}: expected one of {', '.join(str(known) for known in words)}; got {word!r}"
        )
    return word


def weights(name: str, given: Any, count: int) -> list[float]:
    """The weights of `count` terms, from a number for all or one for each; a ValueError unless they are >= 0."""
    numbers: list[float] = []
    if not isinstance(given, (str, bool)):
        with suppress(TypeError, ValueError):  # no numbers
            numbers = [float(w) for w in ([given] * count if isinstance(given, Real) else given)]
    if len(numbers) != count or not all(0 <= w < inf for w in numbers):
        raise ValueError(
            f"{name}: expected a number of at least 0, or {count} of them, got {given!r}"
        )
    return numbers


def came(x: object) -> str:
    """What came instead of a tensor that fits."""
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_module(name: str, x: object, way_out: str = "wrap it in one") -> None:
    """Raise a ValueError for anything but a module."""
    if not isinstance(x, nn.Module):
        raise ValueError(f"{name}: expected a torch.nn.Module, got {type(x).__name__}; {way_out}")


def check_batch(embeddings: Any, labels: Any, tuples: Any = None, kind: str = "") -> None:
    """Raise a ValueError for embeddings that are no floating point tensor, labels that are no tensor, odd tuples.

    `kind` is "ref_" for a reference set, whose embeddings are `ref_emb`.
    """
    if not isinstance(labels, Tensor | None):
        raise ValueError(
            f"{kind}labels: expected a tensor, got {type(labels).__name__}; pass torch.as_tensor(labels)"
        )
    if tuples is not None:
        parts = list(tuples) if isinstance(tuples, tuple | list) else [tuples]
        if len(parts) not in (3, 4) or not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(
                "indices_tuple: expected 3 or 4 tensors, as PML's miners return, got "
                f"{', '.join(map(came, parts)) or 'none'}"
            )
    if isinstance(embeddings, Tensor) and embeddings.is_floating_point():
        return
    way_out = "call loss(embeddings, labels)"
    if isinstance(embeddings, Mapping):
        way_out = (
            f"pass the tensor in it, such as output.{floating(embeddings, 'sentence_embedding')}"
        )
    raise ValueError(
        f"{'ref_emb' if kind else 'embeddings'}: expected a floating point tensor (N, E), got {came(embeddings)}; "
        f"{way_out}"
    )


def floating(output: Mapping[str, Any], *first: str) -> str:
    """The name of an output that may be features: one of the first ones, or of a floating point tensor."""
    named = [name for name, x in output.items() if isinstance(x, Tensor) and x.is_floating_point()]
    return next((name for name in (*first, *named, *output) if name in output), "...")


def class_count(loss: nn.Module) -> int:
    """How many classes a PML loss looks up by the labels, or 0; ProxyNCALoss says 0 of itself."""
    count: Any = getattr(loss, "num_classes", 0)
    if not count and isinstance(loss, ProxyNCALoss):
        count = len(loss.proxies)
    elif not count and isinstance(loss, NormalizedSoftmaxLoss):
        count = loss.W.shape[1]
    elif isinstance(loss, MarginLoss) and len(loss.beta) > 1:
        count = len(loss.beta)
    return count if isinstance(count, int) else 0


def check_classes(loss: str, labels: Tensor | None, num_classes: int) -> None:
    """Raise a ValueError for labels that are no classes of a loss; on a GPU, its kernels refuse wrong numbers."""
    if labels is None or torch.compiler.is_compiling():
        return
    if labels.dtype != torch.int64:
        raise ValueError(
            f"labels: {loss} looks its {num_classes} classes up by int64 numbers from 0, got {labels.dtype}; pass "
            "labels.long()"
        )
    if labels.device.type != "cpu" or len(labels) == 0:
        return
    least, most = (int(label) for label in labels.aminmax())
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"labels: {loss} expected 0 to {num_classes - 1} (num_classes={num_classes}), got {least} to {most}; "
            "number the classes from 0, or pass num_classes=... to match them"
        )


class Around(nn.Module):
    """A loss around another one, whose public attributes it offers to read."""

    inner_place = "loss.loss"
    """Where a user finds the loss inside."""

    def _inner(self) -> nn.Module | None:
        """The loss inside, once it is there; from the module's own dict, since this is asked for any attribute."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner, told = self._inner(), f"{type(self).__name__!r} object has no attribute {name!r}"
        if inner is not None and not name.startswith("_") and hasattr(inner, name):
            if name not in ("attach", "detach"):  # which would return the loss inside
                return getattr(inner, name)
            told += f"; {name} the {type(inner).__name__} before it is wrapped, or call attach_all(loss, head)"
        raise AttributeError(told)

    def __setattr__(self, name: str, value: Any) -> None:
        inner, kinds = self._inner(), ("_parameters", "_buffers", "_modules")
        own = hasattr(type(self), name) or any(
            name in held
            for held in (self.__dict__, *(self.__dict__.get(kind, {}) for kind in kinds))
        )
        if inner is not None and not (own or name.startswith("_")) and hasattr(inner, name):
            raise AttributeError(
                f"{name}: {type(self).__name__} reads it from the {type(inner).__name__} inside; set it there, "
                f"{self.inner_place}.{name} = ..."
            )
        super().__setattr__(name, value)
