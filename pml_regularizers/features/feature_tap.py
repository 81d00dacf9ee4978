"""Taps: what the stages of a network returned, kept until a loss asks for the features of its embeddings.

A tap records forward passes: the output of each tapped stage, and at the end what the embedder returned. A call of
the loss takes the pass that made its embeddings, and no other. These are

1. the embedder's output itself, a view of it, or its `detach()`;
2. with gradients: what is computed from it, by the autograd graph, but with its rows in place;
3. without: equal numbers, such as its copy in another precision, or several outputs concatenated;
4. where the embedder is unknown and there is no graph: of the only pass, if a call took each pass before it.

Everything else raises `MissingFeaturesError`.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..distributed import matches_batch, own_embeddings

Features = Tensor | tuple[Tensor, ...]
"""Features for a loss: one tensor, or several that belong together, such as (tokens, padding mask)."""

_HEAD, _EMBEDDER, _DROPPED = "<head>", "<embedder>", "<dropped>"
_MOVES_ROWS = (
    *("Index", "Select", "Slice", "Split", "Unbind", "Gather", "Flip", "Roll", "Sort", "Topk"),
    *("MaskedSelect", "Permute", "Transpose", "TBackward", "Stack", "Repeat", "Take", "Unfold"),
)
"""Starts of the names of autograd nodes that may move a row to another place."""


class MissingFeaturesError(ValueError):
    """The loss needs features that it was not given, or that cannot be those of its embeddings."""


class _Records(threading.local):
    """What modules returned in one thread, by the names of the stages: with gradients enabled, and without.

    The lists are changed in place: code from torch.compile would forget an attribute that it sets here.
    """

    def __init__(self) -> None:
        self.training: list[tuple[str, Any]] = []
        self.testing: list[tuple[str, Any]] = []
        self.skipped: list[
            bool
        ] = []  # kinds of passes (training?) of which one was dropped without a call
        self.called: list[
            StorageWeakRef
        ] = []  # embeddings of earlier calls, whose embedder is unknown


@dataclass(eq=False)
class _Pass:
    """One forward pass: what its stages and its embedder returned, and how many records end with it."""

    training: bool
    features: dict[str, Features] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    end: int = 0


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
        embedder: The module that returns the embeddings. An `EmbeddingHead` tells its stages' taps by itself.
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
        modules = [*stages.items(), *([] if embedder is None else [(_EMBEDDER, embedder)])]
        for _, module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"module: expected a torch.nn.Module to tap, got {type(module).__name__}; "
                    "pass a stage of the network, such as head.feature_map"
                )
        self.names = tuple(stages)
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
        for training, records in ((True, self._records.training), (False, self._records.testing)):
            if records:
                self._skip(training)
            records.clear()

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
        passes = self.pop(embeddings)
        if not passes:
            for one in self._passes():
                self._skip(one.training)
            raise MissingFeaturesError(self._why_missing(embeddings))
        features = {name: _joined([one.features[name] for one in passes]) for name in self.names}
        for name, value in features.items():
            rows = len(first_tensor(value))
            if not matches_batch(rows, len(embeddings)):
                raise MissingFeaturesError(
                    f"{name}: the passes that made these {len(embeddings)} embeddings recorded features of {rows} "
                    "samples; call the loss with the embeddings of whole passes"
                )
            if embeddings.requires_grad and not self._frozen and not _trains(value):
                raise MissingFeaturesError(f"{name}: {_NO_GRADIENT}")
        return features

    def pop(self, embeddings: Tensor) -> list[_Pass]:
        """Forget the passes that made `embeddings` and the older ones; the former, in the order of their rows.

        Raises:
            MissingFeaturesError: if the rows of the embedder's output were moved.
        """
        own = own_embeddings(embeddings)
        passes = self._passes()
        usable = [
            one
            for one in passes
            if one.features.keys() == set(self.names) and (one.training or not own.requires_grad)
        ]
        makers = _makers(own, usable)
        if not any(one.outputs for one in makers):
            makers = makers or self._only(own, usable)
            self._records.called[:] = [ref for ref in self._records.called if not ref.expired()]  # type: ignore[no-untyped-call]
            self._records.called.append(StorageWeakRef(own.untyped_storage()))  # type: ignore[no-untyped-call]
        for training, records in ((True, self._records.training), (False, self._records.testing)):
            end = max((one.end for one in makers if one.training == training), default=0)
            if any(
                one.end < end and one.training == training and one not in makers for one in passes
            ):
                self._skip(training)
            del records[:end]
        return makers

    def _only(self, embeddings: Tensor, passes: list[_Pass]) -> list[_Pass]:
        """The only pass, if the embedder is unknown and no embeddings of another pass can be left."""
        kinds = {True} if embeddings.requires_grad else {True, False}
        sure = (
            len(passes) == 1 and not passes[0].outputs and kinds.isdisjoint(self._records.skipped)
        )
        frozen = self._frozen or not embeddings.requires_grad
        alive = any(not reference.expired() for reference in self._records.called)  # type: ignore[no-untyped-call]
        return passes if sure and frozen and not alive else []

    def _passes(self) -> list[_Pass]:
        """The recorded passes, those with gradients first."""
        passes: list[_Pass] = []
        for training, records in ((True, self._records.training), (False, self._records.testing)):
            covered: list[_Pass] = []  # since the embedder's last output
            whole = True
            for end, (name, output) in enumerate(records, start=1):
                if name == _DROPPED:
                    whole = False
                elif name == _EMBEDDER:
                    if whole and len(covered) == 1:
                        covered[0].outputs += _tensors(output)
                        covered[0].end = end
                    covered, whole = [], True
                elif name == _HEAD:
                    if covered:
                        covered[-1].outputs += _tensors(output)
                        covered[-1].end = end
                else:
                    if not covered or name in covered[-1].features:
                        covered.append(_Pass(training))
                        passes.append(covered[-1])
                    covered[-1].features[name] = output
                    covered[-1].end = end
        return passes

    def _record(self, name: str, output: Any) -> None:
        if not self._listening:
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # a backward pass is recomputing a checkpointed segment
        if name in self.names:
            first_tensor(output)
        training = torch.is_grad_enabled()
        records = self._records.training if training else self._records.testing
        recorded = [other for other, _ in records]
        if training and recorded.count(name) >= self.capacity:
            records[: recorded.index(name) + 1] = [(_DROPPED, None)]
            self._skip(training)
        elif not training and name in self.names and (name in recorded or _EMBEDDER in recorded):
            whole = recorded[-1] == _EMBEDDER
            records.clear()
            self._skip(training)
            if not whole:
                records.append((_DROPPED, None))
        records.append((name, output))

    def _skip(self, training: bool) -> None:
        if training not in self._records.skipped:
            self._records.skipped.append(training)

    def _why_missing(self, embeddings: Tensor) -> str:
        passes = self._passes()
        training = [one for one in passes if one.training]
        traced = [one for one in training if any(map(_trains, one.features.values()))]
        if embeddings.requires_grad and passes and not (training if self._frozen else traced):
            return _NO_GRADIENT
        for name in self.names:
            if passes and name not in passes[-1].features:
                return f"{name}: {_NO_RECORD}"
        if any(one.outputs for one in passes):
            return _OTHER_PASS
        return _NO_EMBEDDER if passes else f"{', '.join(self.names)}: {_NO_RECORD}"

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
    "the recorded features are not known to be those of these embeddings, which another pass made, or which were "
    "changed behind the module that returned them: call the loss once for each pass, with what it returned; "
    "attach(..., embedder=module) to the module that returns the embeddings; or pass features=..."
)
_NO_EMBEDDER = (
    "the features that are recorded are not known to be those of these embeddings: without a gradient, the module "
    "that returned the embeddings must be known; attach(stage, embedder=head), or pass features=..."
)
_MOVED = (
    "rows of the network's output were selected or reordered before the loss, but not their features: call the "
    "loss with the whole output, or pass features=..."
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
        if tap is not None:
            tap._record(_HEAD, output)

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


# Which passes made the embeddings?


def _makers(embeddings: Tensor, passes: Sequence[_Pass]) -> list[_Pass]:
    """The passes whose outputs are the rows of `embeddings`, in their order; none if that is not sure."""
    for one in reversed(passes):
        if any(_same_memory(output, embeddings) for output in one.outputs):
            return [one]
    makers = _in_graph(embeddings, passes) if embeddings.requires_grad else []
    if makers:
        return makers
    for one in reversed(passes):
        if any(_equal(output, embeddings) for output in one.outputs):
            return [one]
    for start in range(len(passes)):
        for stop in range(start + 2, len(passes) + 1):
            several = [one for one in passes[start:stop] if one.outputs]
            if sum(len(one.outputs[-1]) for one in several) == len(embeddings) and _equal(
                torch.cat([one.outputs[-1] for one in several]), embeddings
            ):
                return several
    return []


def _same_memory(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    alike = (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    return alike and x.data_ptr() == y.data_ptr()


def _equal(output: Tensor, embeddings: Tensor) -> bool:
    """True if the embeddings are a copy of the output, perhaps in another precision."""
    if output.shape[1:] != embeddings.shape[1:] or not matches_batch(len(output), len(embeddings)):
        return False
    rows = embeddings[: len(output)].detach()  # PML's DistributedLossWrapper: own rows first
    equal = torch.eq(output.detach().to(rows), rows) | (rows != rows)  # NaN is as good as any
    return bool(equal.all())


def _in_graph(embeddings: Tensor, passes: Sequence[_Pass]) -> list[_Pass]:
    """The passes that the autograd graph of `embeddings` goes back to, in the order of the inputs of its nodes."""
    outputs = {_node(x): one for one in passes for x in one.outputs if x.requires_grad}
    stages = {
        _node(x): one
        for one in passes
        for features in one.features.values()
        for x in tree_leaves(features)
        if isinstance(x, Tensor) and x.requires_grad
    }
    if not outputs and not stages:
        return []
    oldest = min(node._sequence_nr() for node in (*outputs, *stages))
    makers: dict[_Pass, None] = {}
    seen: set[tuple[Node, bool]] = set()
    root = _node(embeddings)
    path = [(root, False)]
    while path:
        node, moved = path.pop()
        if (node, moved) in seen or node._sequence_nr() < oldest:
            continue
        seen.add((node, moved))
        if node in outputs:
            if moved:
                raise MissingFeaturesError(_MOVED)
            makers[outputs[node]] = None
        elif node in stages:
            if node is not root and _moves_rows(root):
                raise MissingFeaturesError(_MOVED)
            makers[stages[node]] = None
        else:
            moved = moved or _moves_rows(node)
            path += [(source, moved) for source, _ in reversed(node.next_functions) if source]
    return list(makers)


def _node(x: Tensor) -> Node:
    return get_gradient_edge(x).node


def _moves_rows(node: Node) -> bool:
    columns = getattr(node, "_saved_dim", 0) in (1, 2**64 - 1)
    return node.name().startswith(_MOVES_ROWS) and not columns


def _tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim > 0]


def _trains(features: Any) -> bool:
    """True if any part requires a gradient: a frozen trunk's features may come with a trained tensor."""
    parts = features if isinstance(features, tuple) else (features,)
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


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
