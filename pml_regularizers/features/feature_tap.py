"""Taps: what the stages of a network returned, kept until a loss asks for the features of its embeddings.

A tap listens to the stages and to the embedder, the module that returns the embeddings, whose call ends a
pass. A pass has the outputs of the stages inside the embedder. Of a stage before it, it has the output that the
embedder was given, or else the only one since the last pass.

A call of the loss takes the features of the pass whose embeddings it has: the tensor, a view or its `detach()`; a
copy, perhaps scaled or in another precision; or those of several passes in a row. Everything else
raises `MissingFeaturesError`, rows in another order above all.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed import own_embeddings, world_size
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


_START, _END = "(", ")"  # of a call of the embedder
HEADS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules whose children are stages, and which return the embeddings themselves."""


@dataclass(eq=False)
class _Record:
    """A call of a stage, by its name, or the start or the end of a call of the embedder."""

    name: str
    output: Any = None
    inputs: Any = None


@dataclass(eq=False)
class _Pass:
    """Embeddings, and the records of the stages of the same pass: none if these are not known."""

    embeddings: list[Tensor]
    stages: list[_Record]
    end: _Record


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
        embedder: The module that returns the embeddings: it contains the stages, or comes after them. Default: the
            `EmbeddingHead` whose children the stages are.
        frozen: True if the stages do not train: their outputs then need no gradient.

    Raises:
        ValueError: for anything but modules; without an embedder, if the stages are no children of a head.
    """

    capacity = 8

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        *,
        embedder: nn.Module | None = None,
        frozen: bool = False,
    ) -> None:
        modules = [*stages.values(), *([] if embedder is None else [embedder])]
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"module: expected a torch.nn.Module to tap, got {type(module).__name__}; "
                    "pass a stage of the network, such as head.feature_map"
                )
        embedder = _head_of(stages.values()) if embedder is None else embedder
        self._names = tuple(stages)
        self._frozen = frozen
        self._records = ThreadLists(2)  # without gradients, and with them
        self._handles = [
            embedder.register_forward_pre_hook(_Hook(self, _START)),
            *(stage.register_forward_hook(_Hook(self, name)) for name, stage in stages.items()),
            embedder.register_forward_hook(_Hook(self, _END)),
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
            parts = [x.output for each in makers for x in each.stages if x.name == name]
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
        self._record(_START, None)
        for name in self._names:
            self._record(name, features[name])
        self._record(_END, embeddings)

    def pop(self, embeddings: Tensor) -> list[_Pass]:
        """Forget the passes that made `embeddings` and the older ones; the former, in the order of their rows."""
        own = own_embeddings(embeddings)
        testing, training = self._records.lists
        passes = self._passes(training, testing)
        if not _traced(own):
            passes = [*self._passes(testing), *passes]
        makers = _makers(own, passes)
        if makers:
            newest = max(map(passes.index, makers))
            served = {id(x) for each in makers for x in (*each.stages, each.end)}
            kept = {id(x) for each in passes[newest + 1 :] for x in (*each.stages, each.end)}
            for records in (testing, training):
                last = max((i for i, x in enumerate(records, 1) if id(x) in served), default=0)
                records[:last] = [x for x in records[:last] if id(x) in kept]
        return makers

    def _passes(self, records: list[_Record], frozen: list[_Record] | None = None) -> list[_Pass]:
        """The passes among the records, oldest first; the output of a frozen stage may be among the others."""
        passes: list[_Pass] = []
        waiting: list[_Record] = []
        start: int | None = None
        apart: list[_Record] = []
        for record in (frozen or []) if self._frozen else []:
            apart = [] if record.name == _END else [*apart, record]
        apart = [x for x in apart if x.name in self._names]
        for record in records:
            if record.name == _START:
                del waiting[: start or 0]  # the embedder failed on these
                start = len(waiting)
            elif record.name != _END:
                waiting.append(record)
            else:
                before, inside = waiting[: start or 0], waiting[start or 0 :]
                given = [x for x in (*before, *apart) if _is_input(x.output, record.inputs)]
                stages: list[_Record] = []
                for name in self._names:
                    choices = [
                        [x for x in some if x.name == name]
                        for some in (inside, given, before, apart)
                    ]
                    found = next(filter(None, choices), [])
                    stages += found if len(found) == 1 else []
                if len(stages) < len(self._names):
                    stages = []
                # A stage may run several times before the embedder does.
                waiting = [x for x in before if x not in stages] if stages and not inside else []
                start = None
                tensors = [
                    x for x in tree_leaves(record.output) if isinstance(x, Tensor) and x.ndim
                ]
                passes.append(_Pass(tensors, stages, record))
        return passes

    def _record(self, name: str, output: Any, inputs: Any = None) -> None:
        """Record a call of a stage, or the start or end of one of the embedder."""
        if not torch.compiler.is_compiling():
            task = torch._C._current_graph_task_id()
            if task != -1 and task not in _whole_passes.lists[0]:
                return  # a backward pass is recomputing a checkpointed segment
        training = torch.is_grad_enabled()
        records = self._records.lists[int(training)]  # torch 2.11 compiles no bool as index
        if name == _END:
            names = [record.name for record in records]
            inside = _START in names and names[-1] != _START
            records.append(_Record(name, output, None if inside else inputs))
            return
        if name != _START:
            first_tensor(output)
        if not training and records and records[-1].name == _END:
            records.clear()
        same = [i for i, record in enumerate(records) if record.name == name]
        # Two at least, or embeddings to come would seem to be those of the last alone.
        if len(same) == (self.capacity if training else 2):
            del records[: same[0] + 1]
        records.append(_Record(name, output))

    def _why_missing(self, embeddings: Tensor) -> str:
        testing, training = (
            [x for x in some if x.name in self._names] for some in self._records.lists
        )
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
    "what the embedder returned and its rows in their order; name the module that returns them, attach(..., "
    "embedder=module); or pass features=..."
)


class _Hook:
    """Hook that hands a module's output to a tap, as long as the tap is in use elsewhere."""

    def __init__(self, tap: FeatureTap | None, name: str) -> None:
        self.tap = (lambda: None) if tap is None else weakref.ref(tap)
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if (tap := self.tap()) is not None:
            tap._record(self._name, output, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (self.tap(), self._name)

    @property
    def __name__(self) -> str:
        raise RuntimeError(
            "torch.jit.script cannot compile a module that a loss is attached to: call loss.detach() before, "
            "or export with torch.jit.trace or torch.export"
        )


def _head_of(stages: Iterable[nn.Module]) -> nn.Module:
    """The head that has one of the stages as a child; the outermost of several."""
    ids = {id(stage) for stage in stages}
    heads = [
        head
        for head in list(HEADS)
        for child in head.children()
        if ids.intersection(map(id, (child, *child.children())))
    ]
    for head in heads:
        if not any(head is x for other in heads if other is not head for x in other.modules()):
            return head
    raise ValueError(
        "embedder: expected the module that returns the embeddings, got none, and the source is no EmbeddingHead; "
        "write attach(trunk, embedder=head), with the network itself where it returns them, or pass features= in "
        "each call"
    )


def _is_input(output: Features, inputs: Any) -> bool:
    """True if a module was given this output of a stage, or a view of it with the rows in their order."""
    x = first_tensor(output)
    return any(
        isinstance(y, Tensor)
        and (len(y), y.stride(0), y.data_ptr()) == (len(x), x.stride(0), x.data_ptr())
        for y in tree_leaves(inputs)
        if isinstance(y, Tensor) and y.numel() and y.ndim and x.ndim
    )


def _makers(embeddings: Tensor, passes: Sequence[_Pass]) -> list[_Pass]:
    """The passes that made `embeddings`, in the order of their rows; none if that is not known."""
    same = [each for each in passes if any(x.is_set_to(embeddings) for x in each.embeddings)]
    if same:
        return same[-1:]
    own, others = divmod(len(embeddings), world_size())
    for count in (
        len(embeddings),
        0 if others else own,
    ):  # PML's DistributedLossWrapper: own rows first
        if makers := _in_a_row(embeddings[:count], passes):
            return makers
    return []


def _in_a_row(rows: Tensor, passes: Sequence[_Pass]) -> list[_Pass]:
    """The passes whose embeddings, one after the other, are these rows; none if that is not certain."""
    makers: list[_Pass] = []
    recorded: list[Tensor] = []
    count = 0
    while count < len(rows):
        fits = [
            (each, x)
            for each in passes
            for x in each.embeddings
            if 0 < len(x) <= len(rows) - count and _alike(x, rows[count : count + len(x)])
        ]
        if not fits or not all(_same_features(each, fits[-1][0]) for each, _ in fits):
            return []
        makers.append(fits[-1][0])
        recorded.append(fits[-1][1])
        count += len(recorded[-1])
    return makers if makers and _in_order(torch.cat(recorded), rows) else []


def _same_features(one: _Pass, other: _Pass) -> bool:
    if one is other:
        return True
    ours, theirs = (tree_leaves([x.output for x in each.stages]) for each in (one, other))
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) > 0 and all(
        x.shape == y.shape and bool((x == y).all()) for x, y in pairs
    )


def _directions(recorded: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both as matrices of rows of unit length, in the precision of `rows`; rows of one number as they are."""
    x, y = (full_precision(x.detach()).to(rows.device).flatten(1) for x in (recorded, rows))
    x, y = (F.normalize(z) if z.shape[1] > 1 else z for z in (x, y))
    return x.to(y.dtype), y


def _alike(recorded: Tensor, rows: Tensor) -> bool:
    """True if each row is the recorded one, perhaps scaled, such as normalized, or in another precision."""
    if rows.shape != recorded.shape:
        return False
    x, y = _directions(recorded, rows)
    eps = max(torch.finfo(x.dtype).eps for x in (recorded, rows))
    # Relative to each number: in bfloat16 the rows of an untrained network differ by a few percent alone.
    rtol = 4 * eps + 64 * torch.finfo(y.dtype).eps
    return torch.allclose(x, y, rtol=rtol, atol=eps / 100, equal_nan=True)


def _in_order(recorded: Tensor, rows: Tensor) -> bool:
    """True if no row is nearer to another recorded one than to its own, beyond what rounding does."""
    x, y = _directions(recorded, rows)
    distances = torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")
    bound = 4 * (distances.amin(dim=1) + torch.finfo(y.dtype).eps)
    return not (distances.diagonal() > bound).any()


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
        name = floating(features, "last_hidden_state", "token_embeddings")
        way_out = f"pass features=output.{name}, or attach the loss to a module that returns the tensor alone"
        if name in ("last_hidden_state", "token_embeddings"):
            way_out = (
                f"pass features=(output.{name}, attention_mask), where the loss reads positions, or their average, "
                f'or attach to the module in it that returns {name}, pool="avg" where pooled features are read'
            )
    raise ValueError(
        f"features: expected a tensor or a tuple of tensors, got {type(features).__name__}; {way_out}"
    )


def floating(output: Mapping[str, Any], *first: str) -> str:
    """The name of an output that may be features: one of the first ones, or of a floating point tensor."""
    named = [name for name, x in output.items() if isinstance(x, Tensor) and x.is_floating_point()]
    return next((name for name in (*first, *named, *output) if name in output), "...")
