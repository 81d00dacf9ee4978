"""Taps: what the stages of a network returned, kept until a loss asks for the features of its embeddings.

A pass is recorded as the outputs of the tapped stages, followed by the embeddings, which an `EmbeddingHead` or the
module named by `embedder=` returned. A call of the loss takes the features of the pass that made its embeddings:

1. the recorded embeddings: the tensor, a view of it, or its `detach()`;
2. a copy of them, scaled or in another precision, or several of them in a row. Where the copy has a gradient, the
   autograd graph says whose copy it is; where it has none, only one pass may have these numbers;
3. where no embeddings were recorded: what is computed from the stages' outputs, by the autograd graph.

Everything else raises `MissingFeaturesError`.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ..distributed import matches_batch, own_embeddings
from ..functional.precision import full_precision

Features = Tensor | tuple[Tensor, ...]
"""Features for a loss: one tensor, or several that belong together, such as (tokens, padding mask)."""

_EMBEDDINGS = "<embeddings>"


class MissingFeaturesError(ValueError):
    """The loss needs features that it was not given, or that cannot be those of its embeddings."""


class _Records(threading.local):
    """What modules returned in one thread, with their names: with gradients enabled, and without.

    The lists are changed in place: code from torch.compile would forget an attribute that it sets here.
    """

    def __init__(self) -> None:
        self.training: list[tuple[str, Any]] = []
        self.testing: list[tuple[str, Any]] = []


@dataclass(eq=False)
class _Pass:
    """A pass whose embeddings are known, or else one output of one stage."""

    features: dict[str, Features]
    embeddings: list[Tensor]
    records: list[tuple[str, Any]]
    end: int  # number of these records to forget with it


class FeatureTap:
    """Records the outputs of a network's stages until a loss takes them.

    A pass serves one call of the loss, and a call forgets the older passes. Of the passes under `torch.no_grad`
    only the last is kept; of those with gradients the last `capacity`, since a trainer may run the network several
    times for one loss (`TwoStreamMetricLoss`). The recomputation of activation checkpointing is not recorded.

    A record is the stage's output itself: later in-place changes of it change the record. Each thread has its own
    records, and must call the loss itself. The tap holds no module, and the modules do not keep the tap alive. It
    is pickled and deep-copied without its records. If the network and the loss are copied *together*, the copies
    stay connected.

    Args:
        stages: Modules whose outputs are recorded, by name: a tensor, or a tuple of tensors with the batch first.
        embedder: The module that returns the embeddings, after the stages of the same pass. An `EmbeddingHead`
            tells the taps on its own stages.
        frozen: True if the stages do not train: their outputs then need no gradient.
    """

    capacity = 8

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        *,
        embedder: nn.Module | None = None,
        frozen: bool = False,
    ) -> None:
        modules = [*stages.items(), *([] if embedder is None else [(_EMBEDDINGS, embedder)])]
        for _, module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"module: expected a torch.nn.Module to tap, got {type(module).__name__}; "
                    "pass a stage of the network, such as head.feature_map"
                )
        self.names = tuple(stages)
        self.has_embedder = embedder is not None
        self._records = _Records()
        self._listening = True
        self._frozen = frozen
        self._handles = [
            module.register_forward_hook(_Hook(self, name)) for name, module in modules
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

    def clear(self) -> None:
        """Forget what was recorded."""
        self._records.training.clear()
        self._records.testing.clear()

    def remove(self) -> None:
        """Forget the records and stop listening to the modules."""
        self.clear()
        self._listening = False  # a copied tap has no handles: its hooks stay and do nothing
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(self, embeddings: Tensor) -> dict[str, Features]:
        """Return the features of the pass that made `embeddings` (N, E), and forget it and the older ones.

        Raises:
            MissingFeaturesError: if no recorded pass is known to have made them, or if its features carry no
                gradient while the embeddings do.
        """
        reason = self._why_missing(embeddings)  # before the records go
        passes = self.pop(embeddings)
        features = {}
        for name in self.names:
            parts = [one.features[name] for one in passes if name in one.features]
            if not parts:
                raise MissingFeaturesError(reason)
            features[name] = _joined(parts)
            rows = len(first_tensor(features[name]))
            if not matches_batch(rows, len(embeddings)):
                raise MissingFeaturesError(
                    f"{name}: {rows} samples were recorded for these {len(embeddings)} embeddings; "
                    "call the loss with the embeddings of whole passes"
                )
            if embeddings.requires_grad and not self._frozen and not _trains(features[name]):
                raise MissingFeaturesError(f"{name}: {_NO_GRADIENT}")
        return features

    def pop(self, embeddings: Tensor) -> list[_Pass]:
        """Forget the passes that made `embeddings` and the older ones; the former, in the order of their rows."""
        own = own_embeddings(embeddings)
        passes = self._passes(self._records.training)
        if not own.requires_grad:
            passes += self._passes(self._records.testing)
        makers = [one for one in passes if any(_same_memory(x, own) for x in one.embeddings)][-1:]
        if not makers and own.requires_grad:
            makers = _in_graph(own, passes)
        elif not makers:
            makers = [one for one in passes if any(_alike(x, own) for x in one.embeddings)]
            makers = makers if len(makers) == 1 else []
        if makers:
            newest = max(makers, key=lambda one: one.end)
            del newest.records[: newest.end]
        return makers

    def _passes(self, records: list[tuple[str, Any]]) -> list[_Pass]:
        passes: list[_Pass] = []
        group: list[_Pass] = []  # since the last embeddings
        for end, (name, output) in enumerate(records, start=1):
            if name != _EMBEDDINGS:
                group.append(_Pass({name: output}, [], records, end))
                continue
            if sorted(name for one in group for name in one.features) == sorted(self.names):
                features = {name: x for one in group for name, x in one.features.items()}
                tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim > 0]
                group = [_Pass(features, tensors, records, end)]
            for one in group:  # several outputs of a stage: forgotten together, or one would remain
                one.end = end
            passes, group = passes + group, []
        if self.has_embedder:
            for one in group:
                one.end = len(records)
        return passes + group

    def _record(self, name: str, output: Any) -> None:
        if not self._listening:
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # a backward pass is recomputing a checkpointed segment
        training = torch.is_grad_enabled()
        records = self._records.training if training else self._records.testing
        recorded = [other for other, _ in records]
        if name == _EMBEDDINGS:
            if recorded and recorded[-1] != _EMBEDDINGS:
                records.append((name, output))
            return
        first_tensor(output)
        # Of outputs without embeddings at least two are kept: of one, the next embeddings would seem to be.
        if not training and recorded and recorded[-1] == _EMBEDDINGS:
            records.clear()
        elif recorded.count(name) >= (self.capacity if training else 2):
            oldest = recorded.index(_EMBEDDINGS if _EMBEDDINGS in recorded else name)
            records[: oldest + 1] = []
        records.append((name, output))

    def _why_missing(self, embeddings: Tensor) -> str:
        training, testing = self._records.training, self._records.testing
        traced = any(self._frozen or _trains(x) for name, x in training if name in self.names)
        if embeddings.requires_grad and (training or testing) and not traced:
            return _NO_GRADIENT
        recorded = {name for name, _ in (*training, *testing)}
        missing = [name for name in self.names if name not in recorded]
        return f"{', '.join(missing)}: {_NO_RECORD}" if missing else _OTHER_PASS

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": None, "_handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _records=_Records())


_NO_RECORD = (
    "no features were recorded since the last call of this loss: run the network once before each call, in the "
    "same thread (torch.nn.DataParallel has others: use DistributedDataParallel); attach before torch.compile (and "
    "torch._dynamo.reset() if an untapped network of the same class was compiled); attach again after copying or "
    "loading the loss; or pass features=..."
)
_NO_GRADIENT = (
    "the recorded features carry no gradient, but the embeddings do: they come from a pass under torch.no_grad, a "
    "detached module or re-entrant activation checkpointing (use_reentrant=True). Tap a module that trains, or, "
    "where the trunk is frozen on purpose, attach(..., frozen=True)"
)
_OTHER_PASS = (
    "the recorded features are not known to be those of these embeddings: call the loss once for each pass, with "
    "what the network returned; name the module that returns it, attach(..., embedder=module); or pass features=..."
)


class _Hook:
    """Hook that hands a module's output to a tap, as long as the tap is in use elsewhere."""

    def __init__(self, tap: FeatureTap, name: str) -> None:
        self._tap = weakref.ref(tap)
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        tap = self._tap()
        if tap is not None:
            tap._record(self._name, output)

    def embedded(self, output: Any) -> None:
        """Record what the head around the tapped stage returned."""
        tap = self._tap()
        if tap is not None and not tap.has_embedder:
            tap._record(_EMBEDDINGS, output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        tap = self._tap()
        return (_Hook, (tap, self._name)) if tap is not None else (_ignore, ())

    @property
    def __name__(self) -> str:
        raise RuntimeError(
            "torch.jit.script cannot compile a module that a loss is attached to: call loss.detach() before, "
            "or export with torch.jit.trace or torch.export"
        )


def _ignore() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    """The copy of a hook whose tap is gone: it does nothing."""


def tell_taps(head: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a head: tell the taps on its stages which embeddings their features belong to."""
    for child in head.children():
        for stage in (child, *child.children()):
            for hook in stage._forward_hooks.values():
                if isinstance(hook, _Hook):
                    hook.embedded(output)


def _same_memory(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    alike = (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    return alike and x.data_ptr() == y.data_ptr()


def _alike(recorded: Tensor, embeddings: Tensor) -> bool:
    """True if each row is the recorded one, perhaps scaled, such as normalized, or in another precision."""
    whole = matches_batch(len(recorded), len(embeddings))
    if recorded.shape[1:] != embeddings.shape[1:] or not whole:
        return False
    both = (
        recorded.detach(),
        embeddings[: len(recorded)].detach(),
    )  # PML's DistributedLossWrapper: own rows first
    eps = max(torch.finfo(x.dtype).eps for x in both)
    x, y = (full_precision(x).to(both[1].device) for x in both)
    if x[0].numel() > 1:  # rows of one number have no direction
        x, y = F.normalize(x), F.normalize(y)
    return torch.allclose(x.to(y.dtype), y, rtol=0, atol=8 * eps, equal_nan=True)


def _in_graph(embeddings: Tensor, passes: Sequence[_Pass]) -> list[_Pass]:
    """The passes that the autograd graph of `embeddings` goes back to, in the order of the inputs of its nodes.

    None if they were recorded with other numbers, or if their rows may have been moved.
    """
    ends = {_edge(x): (one, x) for one in passes for x in one.embeddings if x.requires_grad}
    stages: dict[Node, list[_Pass]] = {}
    for one in passes:
        for x in [] if one.embeddings else tree_leaves(one.features):
            if isinstance(x, Tensor) and x.requires_grad:
                stages.setdefault(_edge(x)[0], []).append(one)
    if not ends and not stages:
        return []
    copied: list[tuple[_Pass, Tensor]] = []
    makers: dict[_Pass, None] = {}
    root = _edge(embeddings)
    path, seen = [root], set()
    while path:
        edge = path.pop()
        if edge in seen:
            continue
        seen.add(edge)
        if edge in ends:
            copied.append(ends[edge])
            continue
        makers |= dict.fromkeys(stages.get(edge[0], []))
        path += [(node, number) for node, number in reversed(edge[0].next_functions) if node]
    if copied:
        same_width = len({x.shape[1:] for _, x in copied}) == 1
        whole = same_width and not makers and _alike(torch.cat([x for _, x in copied]), embeddings)
        return [one for one, _ in copied] if whole else []
    moved = root[0] not in stages and root[0].name().startswith(_MOVES_ROWS)
    return [] if moved else list(makers)


_MOVES_ROWS = ("Index", "Flip", "Roll", "Gather", "Sort")
"""Starts of the names of autograd nodes that put rows in another order, as a last step before the loss."""


def _edge(x: Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _trains(features: Any) -> bool:
    """True if any part requires a gradient: a frozen trunk's features may come with a trained tensor."""
    return any(isinstance(part, Tensor) and part.requires_grad for part in tree_leaves(features))


def first_tensor(features: Any) -> Tensor:
    """The tensor itself, or the first of a tuple.

    Raises:
        ValueError: for anything else.
    """
    first = features[0] if isinstance(features, tuple) and features else features
    if isinstance(first, Tensor):
        return first
    way_out = "attach the loss to a module that returns its features"
    if isinstance(features, Mapping):  # Hugging Face's ModelOutput is one
        name = (
            "last_hidden_state" if "last_hidden_state" in features else next(iter(features), "...")
        )
        way_out = f"pass features=output.{name}, or attach the loss to a module that returns the tensor alone"
    raise ValueError(
        f"features: expected a tensor or a tuple of tensors, got {type(features).__name__}; {way_out}"
    )


def _joined(records: list[Features]) -> Features:
    if len(records) == 1:
        return records[0]
    parts = [record if isinstance(record, tuple) else (record,) for record in records]
    joined = tuple(torch.cat(same) for same in zip(*parts, strict=True))
    return joined if isinstance(records[0], tuple) else joined[0]
