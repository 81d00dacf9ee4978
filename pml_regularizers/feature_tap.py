"""Taps: records of a network stage's output, kept until a loss takes them."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import are_own_rows

Features = Tensor | tuple[Tensor, ...]
"""Features for a loss: one tensor, or several that belong together, such as (tokens, padding mask)."""


class MissingFeaturesError(ValueError):
    """The loss needs features that it was not given, or that cannot be those of its embeddings."""


class _Passes(threading.local):
    """Records of one thread's passes: outputs with gradients, and the last one without.

    The lists are changed in place: code from torch.compile would forget an attribute that it sets here.
    """

    def __init__(self) -> None:
        self.records: list[Features] = []
        self.detached: list[Features] = []


class FeatureTap:
    """Records the output of one module until a loss takes it.

    A record serves one call of the loss. Records made under `torch.no_grad` (testing, mining a
    subset) replace each other; those made with gradients are kept until they are taken, at most
    `capacity` of them, since a trainer may run the network several times for one loss
    (`TwoStreamMetricLoss`). The recomputation of activation checkpointing is not recorded.

    Records are joined in the order of the passes. A record is the module's output itself: later in-place changes
    of the output change the record. Each thread has its own records, and must call the loss itself.

    The tap holds no module, and the module does not keep the tap alive. It is pickled and deep-copied without its
    records. If the network and the loss are copied *together*, the copies stay connected.

    Args:
        module: The module whose output is recorded: a tensor, or a tuple of tensors with the batch first.
        frozen: True if the module does not train: its output then needs no gradient.
    """

    capacity = 8

    def __init__(self, module: nn.Module, *, frozen: bool = False) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"module: expected a torch.nn.Module to tap, got {type(module).__name__}; "
                "pass a stage of the network, such as head.feature_map"
            )
        self._passes = _Passes()
        self._listening = True
        self._frozen = frozen
        handle = module.register_forward_hook(_Hook(self))
        self._handle: torch.utils.hooks.RemovableHandle | None = handle
        weakref.finalize(self, handle.remove).atexit = False

    def clear(self) -> None:
        """Forget what was recorded: call it after forward passes whose loss was skipped."""
        self._passes.records.clear()
        self._passes.detached.clear()

    def remove(self) -> None:
        """Forget the records and stop listening to the module."""
        self.clear()
        self._listening = False  # a copied tap has no handle: its hook stays and does nothing
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take(self, embeddings: Tensor) -> Features:
        """Return the recorded features of `embeddings` (N, E), and forget them.

        Raises:
            MissingFeaturesError: if nothing was recorded since the last call, if the records are
                not those of N samples, or if they carry no gradient while the embeddings do.
        """
        records, detached = self.pop(embeddings)
        if not records and detached:
            raise MissingFeaturesError(
                "the recorded features carry no gradient, but the embeddings do: they come from a pass under "
                "torch.no_grad, a detached module or re-entrant activation checkpointing (use_reentrant=True). "
                "Tap a module that trains, or, where the trunk is frozen on purpose, attach(..., frozen=True)"
            )
        if not records:
            raise MissingFeaturesError(
                "no features were recorded since the last call of this loss: run the network once before each "
                "call, in the same thread (torch.nn.DataParallel has others: use DistributedDataParallel); attach "
                "before torch.compile (and torch._dynamo.reset() if an untapped network of the same class was "
                "compiled); attach again after copying or loading the loss; or pass features=..."
            )
        return _joined(records, len(embeddings))

    def pop(self, embeddings: Tensor) -> tuple[list[Features], list[Features]]:
        """Forget the records of the passes that made `embeddings`: all with gradient, and the last without."""
        records, detached = list(self._passes.records), list(self._passes.detached)
        if embeddings.requires_grad or (records and not detached):
            self.clear()
            return records, detached
        # A test run between a training step's forward pass and its loss keeps that step's record.
        self._passes.detached.clear()
        return detached, []

    def _record(self, output: Any) -> None:
        if not self._listening:
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # a backward pass is recomputing a checkpointed segment
        # A view of a parameter requires a gradient even where none is recorded.
        if not (torch.is_grad_enabled() and (self._frozen or _trains(output))):
            self._passes.detached.clear()
            self._passes.detached.append(output)
            return
        if len(self._passes.records) >= self.capacity:
            self._passes.records.pop(0)
        self._passes.records.append(output)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passes": None, "_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _passes=_Passes())


class _Hook:
    """Hook that hands a module's output to a tap, as long as the tap is in use elsewhere."""

    def __init__(self, tap: FeatureTap) -> None:
        self._tap = weakref.ref(tap)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        tap = self._tap()
        if tap is not None:
            tap._record(output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        tap = self._tap()
        return (_Hook, (tap,)) if tap is not None else (_ignore, ())


def _ignore() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    """The copy of a hook whose tap is gone: it does nothing."""


def _trains(features: Any) -> bool:
    """True if any part requires a gradient: a frozen trunk's features may come with a trained tensor."""
    first = first_tensor(features)
    parts = features if isinstance(features, tuple) else (first,)
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


def first_tensor(features: Any) -> Tensor:
    first = features[0] if isinstance(features, tuple) and features else features
    if not isinstance(first, Tensor):
        raise ValueError(
            f"features: expected a tensor or a tuple of tensors, got {type(features).__name__}; "
            "attach the loss to a module that returns its features"
        )
    return first


def _joined(records: list[Features], batch_size: int) -> Features:
    sizes = [len(first_tensor(record)) for record in records]
    if not are_own_rows(sum(sizes), batch_size):
        raise MissingFeaturesError(
            f"features of {' + '.join(map(str, sizes))} samples were recorded since the last call of this loss, "
            f"but the embeddings are of {batch_size}: each forward pass needs its call; after passes that were "
            f"skipped or failed, call loss.clear() (at most {FeatureTap.capacity} passes are kept)"
        )
    if len(records) == 1:
        return records[0]
    parts = [record if isinstance(record, tuple) else (record,) for record in records]
    joined = tuple(torch.cat(same) for same in zip(*parts, strict=True))
    return joined if isinstance(records[0], tuple) else joined[0]
