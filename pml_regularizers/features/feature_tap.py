"""Taps: what the stages of a network returned, kept until a loss asks for the features of its embeddings.

An output of a tapped stage is a record. When the embeddings of its pass come, from an `EmbeddingHead` or the module
named by `embedder=`, they join it. A call of the loss takes the features of the pass that made its embeddings:

1. the recorded embeddings: the tensor, a view of it, or its `detach()`;
2. a copy of them, scaled or in another precision, or several of them in a row. Where the copy has a gradient, the
   autograd graph says whose copy it is; where it has none, only one pass may have these numbers;
3. where no embeddings were recorded: what is computed from the stages' outputs, by the autograd graph.

Everything else raises `MissingFeaturesError`.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed import matches_batch, own_embeddings
from ..functional.precision import full_precision

Features = Tensor | tuple[Tensor, ...]
"""Features for a loss: one tensor, or several that belong together, such as (tokens, padding mask)."""


class MissingFeaturesError(ValueError):
    """The loss needs features that it was not given, or that cannot be those of its embeddings."""


class ThreadLists(threading.local):
    """Some lists for each thread, empty in a copy. Compiled code may change them, but not set attributes."""

    def __init__(self, count: int) -> None:
        self.lists: list[list[Any]] = [[] for _ in range(count)]

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadLists, (len(self.lists),)


_whole_passes = ThreadLists(1)
"""The backward passes, by number, inside which a network runs as a whole."""


@contextmanager
def recording_in_backward() -> Iterator[None]:
    """Record passes of the network that are made inside the backward pass under way."""
    (tasks,) = _whole_passes.lists
    tasks.append(torch._C._current_graph_task_id())
    try:
        yield
    finally:
        tasks.pop()


@dataclass(eq=False)
class _Record:
    """An output of a stage."""

    name: str
    output: Features
    embeddings: list[Tensor] | None = None
    """Embeddings of the same pass, whose records share the list: None until they come, empty if not known."""


class FeatureTap:
    """Records the outputs of a network's stages until a loss takes them.

    A pass serves one call of the loss, and a call forgets the older passes. Of the passes under `torch.no_grad`
    only the last is kept; of those with gradients the last `capacity`, since a trainer may run the network several
    times for one loss (`TwoStreamMetricLoss`). The recomputation of activation checkpointing is not recorded.

    A record is the stage's output itself. Each thread has its own records, and must call the loss itself. The tap
    holds no module, and the modules do not keep the tap alive. It is pickled and deep-copied without its records.
    If the network and the loss are copied *together*, the copies stay connected.

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
        modules: list[tuple[str | None, nn.Module]] = [*stages.items()]
        if embedder is not None:
            modules.append((None, embedder))
        for _, module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"module: expected a torch.nn.Module to tap, got {type(module).__name__}; "
                    "pass a stage of the network, such as head.feature_map"
                )
        self.has_embedder = embedder is not None
        self._names = tuple(stages)
        self._frozen = frozen
        self._records = ThreadLists(2)  # without gradients, and with them
        self._handles = [
            module.register_forward_hook(_Hook(self, name)) for name, module in modules
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

    def clear(self) -> None:
        """Forget what was recorded."""
        for records in self._records.lists:
            records.clear()

    def remove(self) -> None:
        """Forget the records and stop listening to the modules."""
        self.clear()
        for handle in self._handles:
            handle.remove()

    def take(self, embeddings: Tensor) -> dict[str, Features]:
        """Return the features of the pass that made `embeddings` (N, E), and forget it and the older ones.

        Raises:
            MissingFeaturesError: if no such pass is known, or its features lack the gradient that embeddings have.
        """
        reason = self._why_missing(embeddings)  # before the records go
        makers = self.pop(embeddings)
        features: dict[str, Features] = {}
        for name in self._names:
            parts = [record.output for record in makers if record.name == name]
            if not parts:
                raise MissingFeaturesError(reason)
            if embeddings.requires_grad and not self._frozen and not _traced(parts):
                raise MissingFeaturesError(f"{name}: {_NO_GRADIENT}")
            features[name] = parts[0]
            if len(parts) > 1:
                features[name] = tree_map(lambda *same: torch.cat(same), *parts)
        return features

    def put(self, features: Mapping[str, Features], embeddings: Any) -> None:
        """Record features by hand, as those of a pass that returned `embeddings`."""
        for name in self._names:
            self._record(name, features[name])
        self._record(None, embeddings)

    def pop(self, embeddings: Tensor) -> list[_Record]:
        """Forget the passes that made `embeddings` and the older ones; the former, in the order of their rows."""
        own = own_embeddings(embeddings)
        lists = self._records.lists[1 if _traced(own) else 0 :]
        makers = _makers(own, [record for records in lists for record in records])
        for records in lists:
            end = max((i for i, record in enumerate(records, 1) if record in makers), default=0)
            if end and records[end - 1].embeddings is None:
                _join(records, [])  # embeddings to come would seem to be those of the rest alone
            del records[:end]
        return makers

    def _record(self, name: str | None, output: Any) -> None:
        """Record the output of a stage, or the embeddings, whose name is None."""
        if not torch.compiler.is_compiling():
            task = torch._C._current_graph_task_id()
            if task != -1 and task not in _whole_passes.lists[0]:
                return  # a backward pass is recomputing a checkpointed segment
        training = torch.is_grad_enabled()
        records = self._records.lists[int(training)]  # torch 2.11 compiles no bool as index
        if name is None:
            waiting = [record.name for record in records if record.embeddings is None]
            known = sorted(waiting) == sorted(self._names)  # each stage once
            tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim > 0]
            _join(records, tensors if known else [])
            return
        first_tensor(output)
        if not training and records and records[-1].embeddings is not None:
            records.clear()
        same = [i for i, record in enumerate(records) if record.name == name]
        # Two at least, or embeddings to come would seem to be those of the last alone.
        if len(same) == (self.capacity if training else 2):
            del records[: same[0] + 1]
        records.append(_Record(name, output))

    def _why_missing(self, embeddings: Tensor) -> str:
        testing, training = self._records.lists
        traced = any(self._frozen or _traced(record.output) for record in training)
        if embeddings.requires_grad and (training or testing) and not traced:
            return _NO_GRADIENT
        recorded = {record.name for record in (*training, *testing)}
        missing = [name for name in self._names if name not in recorded]
        return f"{', '.join(missing)}: {_NO_RECORD}" if missing else _OTHER_PASS

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}


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

    def __init__(self, tap: FeatureTap | None, name: str | None) -> None:
        self.tap = (lambda: None) if tap is None else weakref.ref(tap)
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if (tap := self.tap()) is not None:
            tap._record(self._name, output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (self.tap(), self._name)

    @property
    def __name__(self) -> str:
        raise RuntimeError(
            "torch.jit.script cannot compile a module that a loss is attached to: call loss.detach() before, "
            "or export with torch.jit.trace or torch.export"
        )


def tell_taps(head: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a head: tell the taps on its stages which embeddings their features belong to."""
    for child in head.children():
        for stage in (child, *child.children()):
            for hook in stage._forward_hooks.values():
                tap = hook.tap() if isinstance(hook, _Hook) else None
                if tap is not None and not tap.has_embedder:
                    tap._record(None, output)


def _join(records: Sequence[_Record], embeddings: list[Tensor]) -> None:
    """Give the records that still wait for their embeddings these."""
    for record in records:
        if record.embeddings is None:
            record.embeddings = embeddings


def _makers(embeddings: Tensor, records: Sequence[_Record]) -> list[_Record]:
    """The records of the passes that made `embeddings`, in the order of their rows; none if that is not known."""
    passes = list({id(x.embeddings): x.embeddings for x in records if x.embeddings}.values())
    found = [one for one in passes if any(x.is_set_to(embeddings) for x in one)][-1:]
    if not found and _traced(embeddings):
        return _in_graph(embeddings, records)
    if not found:
        found = [one for one in passes if any(_alike(x, embeddings) for x in one)]
    return [record for record in records if len(found) == 1 and record.embeddings is found[0]]


def _alike(recorded: Tensor, embeddings: Tensor) -> bool:
    """True if each row is the recorded one, perhaps scaled, such as normalized, or in another precision."""
    width, count = recorded.shape[1:], len(recorded)
    whole = len(embeddings) == count or matches_batch(count, len(embeddings))
    if embeddings.shape[1:] != width or not whole:
        return False
    rows = embeddings[:count]  # PML's DistributedLossWrapper: own rows first
    eps = max(torch.finfo(x.dtype).eps for x in (recorded, rows))
    x, y = (full_precision(x.detach()).to(rows.device) for x in (recorded, rows))
    if width.numel() > 1:  # rows of one number have no direction
        x, y = F.normalize(x), F.normalize(y)
    # Relative to each number: in bfloat16 the rows of an untrained network differ by a few percent alone.
    rtol = 4 * eps + 64 * torch.finfo(y.dtype).eps
    return torch.allclose(x.to(y.dtype), y, rtol=rtol, atol=eps / 100, equal_nan=True)


def _in_graph(embeddings: Tensor, records: Sequence[_Record]) -> list[_Record]:
    """The records that the autograd graph of `embeddings` goes back to, in the order of the inputs of its nodes.

    None if they were recorded with other numbers, or if a node on the way to a stage puts rows in another order.
    """
    # By node and output of embeddings, by node of stages: a compiled network is one node, and embeddings computed
    # from a stage are another output of it.
    ends: dict[Any, list[tuple[_Record, Tensor]]] = {}
    for record in records:
        for x in _traced(record.embeddings or record.output):
            edge = get_gradient_edge(x)[:2]
            ends.setdefault(edge if record.embeddings else edge[0], []).append((record, x))
    path, seen = [get_gradient_edge(embeddings)[:2]] if ends else [], set()
    before: dict[Any, list[Any]] = {}  # by node, those that lead back to it
    found: dict[Any, list[tuple[_Record, Tensor]]] = {}  # by edge, in this order
    while path:
        edge = path.pop()
        if edge in seen:
            continue
        seen.add(edge)
        if made := ends.get(edge) or ends.get(edge[0], []):
            found[edge] = made
        if edge not in ends:
            for node, number in reversed(edge[0].next_functions):
                if node:
                    before.setdefault(node, []).append(edge[0])
                    path.append((node, number))
    makers = [record for made in found.values() for record, _ in made]
    copied = [made[0][1] for made in found.values() if made[0][0].embeddings]
    if copied:
        if len(copied) < len(found) or len({x.shape[1:] for x in copied}) > 1:
            return []
        return makers if _alike(torch.cat(copied), embeddings) else []
    stages = {node for node, _ in found}
    between, nodes = set(stages), list(stages)
    while nodes:
        following = set(before.get(nodes.pop(), [])) - between
        between |= following
        nodes += following
    return [] if any(map(_moves_rows, between - stages)) else list(dict.fromkeys(makers))


def _moves_rows(node: Any) -> bool:
    """True if an autograd node puts rows, its axis 0, in another order; views and products are not looked into."""
    if not node.name().startswith(("Index", "Flip", "Roll", "Gather", "Sort")):
        return False
    indices = getattr(node, "_saved_indices", None)
    if isinstance(indices, tuple):  # x[rows] or x[:, columns]
        return indices[0] is not None
    axes = getattr(node, "_saved_dims", (getattr(node, "_saved_dim", 0),))
    last = 2**64 - 1  # -1, as autograd keeps it; axes before it may be the rows
    return not axes or any(axis == 0 or last // 2 < axis < last for axis in axes)


def _traced(values: Any) -> list[Tensor]:
    """The tensors that autograd traces back; a view made under `torch.no_grad` only says that it does."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]
    return [x for x in tensors if x.grad_fn is not None or x._base is None]


def first_tensor(features: Any) -> Tensor:
    """The tensor itself, or the first of a tuple; a ValueError for anything else."""
    first = features[0] if isinstance(features, tuple) and features else features
    if isinstance(first, Tensor):
        return first
    way_out = "attach the loss to a module that returns its features"
    if isinstance(features, Mapping):  # Hugging Face's ModelOutput is one
        names = [name for name in features if name == "last_hidden_state"] or [*features, "..."]
        way_out = f"pass features=output.{names[0]}, or attach the loss to a module that returns the tensor alone"
    raise ValueError(
        f"features: expected a tensor or a tuple of tensors, got {type(features).__name__}; {way_out}"
    )
