"""Taps: what the stages of a network returned, kept until a loss asks for the features of its embeddings.

A tap listens to the stages and to the embedder, the module that returns the embeddings, whose call ends a
pass. A pass has the outputs of the stages inside the embedder. Of a stage before it, it has the output that the
embedder was given, or else the only one since the last pass.

A call of the loss takes the features of the pass whose embeddings it has: the tensor, a view or its `detach()`; a
copy, perhaps scaled or in another precision; or those of several passes in a row. Everything else
raises `MissingFeaturesError`, rows in another order above all, and embeddings that were changed in place.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed import own_embeddings, world_size
from ..functional.checks import check_module, one_of
from ..functional.precision import full_precision
from .feature_maps import HEADS, first_tensor, pooled_map

Features = Tensor | tuple[Tensor, ...]
"""Features for a loss: one tensor, or several that belong together, such as (tokens, padding mask)."""


class MissingFeaturesError(ValueError):
    """The loss needs features that it was not given, or that cannot be those of its embeddings."""


class ThreadStack(threading.local):
    """A list for each thread, empty in a copy. Compiled code may change a list, but no context variable."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadStack, ()


_whole_passes = ThreadStack()
"""The backward passes, by number, inside which a network runs as a whole."""


@contextmanager
def recording_in_backward() -> Iterator[None]:
    """Record passes of the network that are made inside the backward pass under way."""
    _whole_passes.stack.append(torch._C._current_graph_task_id())
    try:
        yield
    finally:
        _whole_passes.stack.pop()


_START, _END = "(", ")"  # of a call of the embedder


@dataclass(eq=False)
class _Call:
    """A call of a stage, by its name, or the start of one of the embedder, or its end: a pass."""

    name: str
    training: bool  # with gradients
    output: Any = None
    inputs: Any = None
    stages: Sequence["_Call"] = ()  # of a pass; not one of each name where they are not known
    versions: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = [_version(x) for x in tree_leaves(self.output)]

    def tensors(self) -> list[Tensor]:
        """The output's tensors with rows, except those that were changed in place since."""
        leaves = zip(tree_leaves(self.output), self.versions, strict=True)
        with_rows = [(x, old, _version(x)) for x, old in leaves if isinstance(x, Tensor) and x.ndim]
        return [x for x, old, now in with_rows if old == now or None in (old, now)]


class FeatureTap:
    """Records the outputs of a network's stages until a loss takes them.

    A pass serves one call of the loss, and a call forgets the older passes. Of the passes under `torch.no_grad`
    only the last is kept; of those with gradients the last `capacity`, since a trainer may run the network several
    times for one loss (`TwoStreamMetricLoss`). The recomputation of activation checkpointing is not recorded.

    A record is the stage's output itself. Each thread has its own records, and must call the loss itself. The tap
    holds no module, and the modules do not keep the tap alive. It is pickled and deep-copied without its records.
    If the network and the loss are copied *together*, the copies stay connected.

    Args:
        stages: Modules by name, whose outputs are a tensor, or a tuple of tensors with the batch first.
        embedder, frozen, pool: As in `FeatureLoss.attach`, whose errors this raises.
    """

    capacity = 8

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        *,
        embedder: nn.Module | None = None,
        frozen: bool = False,
        pool: str | None = None,
    ) -> None:
        if pool is not None:
            one_of("pool", pool, ["avg"])
        for name, module in stages.items():
            check_module(name, module, "attach to a stage of the network, such as head.feature_map")
        if embedder is not None:
            check_module("embedder", embedder, "pass the module that returns the embeddings")
        self._names = tuple(stages)
        self._frozen = frozen
        self._pool = pool
        head = _head_of(stages.values())
        # Stages of a head are what their names say, also where it returns one of them as the embeddings.
        self._known = all(getattr(head, name, None) is x for name, x in stages.items())
        embedder = head if embedder is None else embedder
        if embedder is None:
            raise ValueError(
                "embedder: expected the module that returns the embeddings, got none, and the source is no "
                "EmbeddingHead; write attach(trunk, embedder=head), with the network itself where it returns them, "
                "or pass features= in each call"
            )
        self._channels_last = getattr(stages.get("pooled"), "output_fmt", "") == "NHWC"  # timm's
        # 0 of the stages of a head; None: not known
        self._prefix_tokens = {
            name: getattr(x, "num_prefix_tokens", 0 if isinstance(x, nn.Identity) else None)
            for name, x in stages.items()
        }
        self._calls = ThreadStack()
        self._handles = [
            embedder.register_forward_pre_hook(_Hook(self, _START)),
            *(stage.register_forward_hook(_Hook(self, name)) for name, stage in stages.items()),
            embedder.register_forward_hook(_Hook(self, _END)),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

    def clear(self) -> None:
        """Forget what was recorded."""
        self._calls.stack.clear()

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
        recorded = {x.name for call in self._calls.stack for x in (call, *call.stages)}
        missing = [name for name in self._names if name not in recorded]
        makers = self.pop(embeddings)
        if not makers or not all(map(self._knows_stages, makers)):
            raise MissingFeaturesError(
                f"{', '.join(missing)}: {_NO_RECORD}" if missing else _OTHER_PASS
            )
        features: dict[str, Features] = {}
        for name in self._names:
            parts = [x.output for each in makers for x in each.stages if x.name == name]
            if embeddings.requires_grad and not self._frozen and not _traced(parts):
                raise MissingFeaturesError(f"{name}: {_NO_GRADIENT.get(name, _UNTRACED)}")
            features[name] = parts[0]
            if len(parts) > 1:
                features[name] = tree_map(lambda *same: torch.cat(same), *parts)
            if not self._known:
                self._check(name, features[name], own_embeddings(embeddings))
            if name == "pooled" and self._pool:
                features[name] = pooled_map(features[name], self._channels_last)
        return features

    def _check(self, name: str, features: Features, embeddings: Tensor) -> None:
        """Raise a MissingFeaturesError for embeddings, or class tokens, in the place of features."""
        x = first_tensor(features)
        if x.numel() == embeddings.numel() > 0 and x.data_ptr() == embeddings.data_ptr():
            raise MissingFeaturesError(
                f"{name}: the tapped module returns the embeddings that the loss is called with; "
                f"{_INSTEAD.get(name, 'attach to the layer whose output the loss shall read')}"
            )
        if x.ndim == 3 and (name == "feature_map" or (name == "pooled" and self._pool)):
            count, side = self._prefix_tokens[name], isqrt(x.shape[1])
            if count is None:  # 14 * 14 + 1 of a vision transformer
                count = int(side >= 3 and x.shape[1] == side * side + 1)
            if count:
                raise MissingFeaturesError(
                    f"{name}: the {x.shape[1]} tokens of the tapped module include {count} that show no part "
                    "of the image, such as a class token; write head = EmbeddingHead(C, E, num_prefix_tokens="
                    f"{count}) and loss.attach(head), or pass features=tokens[:, {count}:]"
                )

    def put(self, features: Mapping[str, Features], embeddings: Any) -> None:
        """Record features by hand, as those of a pass that returned `embeddings`."""
        self._record(_START)
        for name in self._names:
            self._record(name, features[name])
        self._record(_END, embeddings)

    def pop(self, embeddings: Tensor) -> list[_Call]:
        """Forget the passes that made `embeddings`, and the older ones; the former, in the order of their rows."""
        own, passes = own_embeddings(embeddings), [x for x in self._calls.stack if x.name == _END]
        training = [each for each in passes if each.training]
        makers = (_traced(own) and _makers(own, training)) or _makers(own, passes)
        if makers:
            newest = max(makers, key=passes.index)
            # But a test may come between a training pass and its loss, and the other way round.
            served = [x for x in passes if x.training == newest.training]
            gone = served[: served.index(newest) + 1]
            self._calls.stack[:] = [x for x in self._calls.stack if x not in gone]
        return makers

    def _knows_stages(self, end: _Call) -> bool:
        return [x.name for x in end.stages] == [*self._names]

    def _take_stages(self, end: _Call) -> None:
        """Move the stages of a pass out of the calls that wait for its end; or all that may be these."""
        calls = self._calls.stack
        waiting = [x for x in calls if x.name != _END]
        # An earlier start is of a call that failed, as on what stands before it.
        failed, start = ([-1, -1] + [i for i, x in enumerate(waiting) if x.name == _START])[-2:]
        before, inside = waiting[failed + 1 : max(start, 0)], waiting[start + 1 :]
        inputs = tree_leaves(end.inputs)
        given = [x for x in before if any(first_tensor(x.output) is y for y in inputs)]
        alike = [x for x in before if x.training == end.training]
        stages: list[_Call] = []
        for name in self._names:
            choices = (
                [x for x in some if x.name == name] for some in (inside, given, alike, before)
            )
            stages += next(filter(None, choices), [])
        end.stages = stages
        # A stage may run several times before the embedder does.
        single = self._knows_stages(end) and not inside
        left = [x for x in before if x not in stages] if single else []
        calls[:] = [x for x in calls if x.name == _END or x in left]

    def _record(self, name: str, output: Any = None, inputs: Any = None) -> None:
        """Record a call of a stage, or the start or end of one of the embedder."""
        if not torch.compiler.is_compiling():
            task = torch._C._current_graph_task_id()
            if task != -1 and task not in _whole_passes.stack:
                return  # a backward pass is recomputing a checkpointed segment
        if name in self._names:
            first_tensor(output)
        training = torch.is_grad_enabled()
        calls = self._calls.stack
        tested = [call.name for call in calls if not call.training]
        if not training and tested and tested[-1] == _END:  # a new test pass
            calls[:] = [call for call in calls if call.training]
        same = [i for i, x in enumerate(calls) if x.name == name and x.training == training]
        # Two at least, or embeddings to come would seem to be those of the last alone.
        if len(same) == (self.capacity if training or self._frozen else 2):
            calls[:] = [x for i, x in enumerate(calls) if i > same[0] or x.training != training]
        call = _Call(name, training, output, inputs)
        if name == _END:
            self._take_stages(call)
        calls.append(call)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}


_NO_RECORD = (
    "no features were recorded since the last call of this loss: run the network once before each call, in the "
    "same thread (torch.nn.DataParallel has others: use DistributedDataParallel); attach before torch.compile (and "
    "torch._dynamo.reset() if an untapped network of the same class was compiled); attach again after copying or "
    "loading the loss; or pass features=..."
)
_UNTRACED = (
    "the recorded features carry no gradient, but the embeddings do: they come from a pass under torch.no_grad, a "
    "detached module or re-entrant activation checkpointing (use_reentrant=True). Tap a module that trains, or, "
    "where the trunk is frozen on purpose, attach(..., frozen=True)"
)
_NO_GRADIENT = {
    "stopgrad_embeddings": "their gradient goes to the head's linear layer alone, and it has none that trains; "
    'choose gradient="all" for the loss, or give the head a layer, head.fc = torch.nn.Linear(C, E)'
}
"""Other reasons, by what is read."""
_OTHER_PASS = (
    "the recorded features are not known to be those of these embeddings: call the loss once for each pass, with "
    "what the embedder returned, not changed in place, and its rows in their order; name the module that returns "
    "them, attach(..., embedder=module); or pass features=..."
)


_INSTEAD = {
    "feature_map": "attach to the trunk, loss.attach(trunk, embedder=head)",
    "pooled": "attach to the layer before the embedding layer, such as loss.attach(head[-2], embedder=head) for an "
    "nn.Sequential",
    "stopgrad_embeddings": "make the head an EmbeddingHead(C, E) and loss.attach(head), or pass "
    'features=fc(pooled.detach()), or choose gradient="all"',
}
"""What to tap instead of the embedder, by what is read."""


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


def _head_of(stages: Iterable[nn.Module]) -> nn.Module | None:
    """The head that has one of the stages as a child; the outermost of several."""
    ids = {id(stage) for stage in stages}
    heads = (
        head
        for head in list(HEADS)
        for child in head.children()
        if ids.intersection(map(id, (child, *child.children())))
    )
    return max(heads, key=lambda head: len([*head.modules()]), default=None)


def _version(x: Any) -> int | None:
    """How often a tensor was changed in place; None where that is not known, as in compiled code."""
    counted = isinstance(x, Tensor) and not torch.compiler.is_compiling() and not x.is_inference()
    return x._version if counted else None


def _makers(rows: Tensor, passes: Sequence[_Call]) -> list[_Call]:
    """The passes that made embeddings, in the order of their rows; none if that is not known."""
    same = [each for each in passes if any(x.is_set_to(rows) for x in each.tensors())]
    if same:
        return same[-1:]
    own, others = divmod(len(rows), world_size())
    # PML's DistributedLossWrapper puts own rows first.
    for count in (len(rows), 0 if others else own):
        if makers := _in_a_row(rows[:count], passes):
            return makers
    return []


def _in_a_row(rows: Tensor, passes: Sequence[_Call]) -> list[_Call]:
    """The passes whose embeddings, one after the other, are these rows; none if that is not certain."""
    makers: list[_Call] = []
    recorded: list[Tensor] = []
    while (count := sum(map(len, recorded))) < len(rows):
        fits = [
            (each, x)
            for each in passes
            for x in each.tensors()
            if len(x) and _alike(x, rows[count : count + len(x)])
        ]
        if not fits or not all(_same_features(each, fits[-1][0]) for each, _ in fits):
            return []
        makers.append(fits[-1][0])
        recorded.append(fits[-1][1])
    return makers if makers and _in_order(torch.cat(recorded), rows) else []


def _same_features(one: _Call, other: _Call) -> bool:
    ours, theirs = (
        [x for call in each.stages for x in tree_leaves(call.output) if isinstance(x, Tensor)]
        for each in (one, other)
    )
    return one is other or (len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs)))


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
