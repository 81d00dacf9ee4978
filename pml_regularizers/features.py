"""How the features that a network computed on the way reach a loss.

pytorch-metric-learning (PML) calls `loss(embeddings, labels, indices_tuple)` and nothing else. A loss that
also reads a feature map gets it, in this order:

1. from the call: `loss(embeddings, labels, features=feature_map)`, or a dict where it reads several;
2. from a tap, bound once: `loss.attach(head)`; trainers, testers, miners and `MultipleLosses` then work
   unchanged;
3. not at all, which raises `MissingFeaturesError`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import Tensor, nn

from .distributed import are_own_rows, world_size
from .heads import Staged
from .precision import full_precision

Features = Tensor | tuple[Tensor, ...]
"""What a loss reads: one tensor, or several that belong together, such as (tokens, padding mask)."""


Loss = TypeVar("Loss", bound=nn.Module)


class MissingFeaturesError(ValueError):
    """The loss needs features that it was not given, or that cannot be those of its embeddings."""


class FeatureTap:
    """Records the output of one module until a loss takes it.

    A record serves one call of the loss. Records made under `torch.no_grad` (testing, mining a
    subset) replace each other; those made with gradients are kept until they are taken, at most
    `capacity` of them, since a trainer may run the network several times for one loss
    (`TwoStreamMetricLoss`). Recomputation by activation checkpointing is not recorded.

    Records are joined in the order of the passes, and a record is the module's output itself: what
    changes it in place afterwards changes it here.

    The tap holds no module, and the module does not keep the tap alive. It pickles and deep-copies
    without its records; a copy of the network and the loss made *together* stays connected.

    Args:
        module: Its output, a tensor or a tuple of tensors with the batch first, is recorded.
        frozen: The module does not train, so that its output needs no gradient to be recorded.
    """

    capacity = 8

    def __init__(self, module: nn.Module, *, frozen: bool = False) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"module: expected a torch.nn.Module to tap, got {type(module).__name__}; "
                "pass a stage of the network, such as head.feature_map"
            )
        self.clear()
        self._listening = True
        self._frozen = frozen
        handle = module.register_forward_hook(_Hook(self))
        self._handle: torch.utils.hooks.RemovableHandle | None = handle
        weakref.finalize(self, handle.remove).atexit = False

    def clear(self) -> None:
        """Forget what was recorded: call it after forward passes whose loss was skipped."""
        self._records: list[Features] = []
        self._detached: Features | None = None

    def remove(self) -> None:
        """Forget the records and stop listening to the module."""
        self.clear()
        self._listening = False  # a copy has no handle: its hook stays and does nothing
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take(self, embeddings: Tensor) -> Features:
        """The recorded features of `embeddings` (N, E), which are then forgotten.

        Raises:
            MissingFeaturesError: if nothing was recorded since the last call, if the records are
                not those of N samples, or if they carry no gradient while the embeddings do.
        """
        records, detached = self.pop(embeddings)
        if not records and detached is not None:
            raise MissingFeaturesError(
                "the recorded features carry no gradient, but the embeddings do: they come from a pass under "
                "torch.no_grad, a detached module or re-entrant activation checkpointing (use_reentrant=True). "
                "Tap a module that trains, or, where the trunk is frozen on purpose, attach(..., frozen=True)"
            )
        if not records:
            raise MissingFeaturesError(
                "no features were recorded since the last call of this loss: run the network once before each "
                "call; attach before torch.compile (and torch._dynamo.reset() if an untapped network of the same "
                "class was compiled); attach again after copying or loading the loss; or pass features=..."
            )
        return _joined(records, len(embeddings))

    def pop(self, embeddings: Tensor) -> tuple[list[Features], Features | None]:
        """Forget the records of the passes that made `embeddings`: those with gradient, and one without."""
        records, detached = self._records, self._detached
        if embeddings.requires_grad or (records and detached is None):
            self.clear()
            return records, detached
        # A test between a training step's forward pass and its loss leaves that step's record.
        self._detached = None
        return [] if detached is None else [detached], None

    def _record(self, output: Any) -> None:
        if not self._listening:
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # a backward pass is recomputing a checkpointed segment
        # A view of a parameter requires a gradient even where none is recorded.
        if not (torch.is_grad_enabled() and (self._frozen or _trains(output))):
            self._detached = output
            return
        self._records = [*self._records[1 - self.capacity :], output]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": [], "_detached": None, "_handle": None}


class _Hook:
    """Hands a module's output to a tap for as long as somebody else holds the tap."""

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
    """What the hook of a lost tap becomes in a copy."""


class FeatureLoss(BaseMetricLossFunction):
    """Base of the losses that read features besides the embeddings.

    Half-precision inputs are raised to float32 and autocast is off inside, so that the loss has one
    value whatever the precision of the network; the loss's parameters are never recast.
    Subclasses say what they read in `reads` and find it in `self.features` in `compute_loss`.
    """

    reads: str | tuple[str, ...] = "feature_map"
    """Stage of an `EmbeddingHead` that `attach(head)` taps; a tuple of names where the features are a dict
    of that many; an empty one where none are read."""

    _features: Features | dict[str, Features] | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._taps: dict[str, FeatureTap] = {}

    def attach(self, source: nn.Module | Mapping[str, nn.Module], *, frozen: bool = False) -> Self:
        """Read the features from a module's output from now on, instead of from `features=`.

        Args:
            source: An `EmbeddingHead` or `AttentionEnsemble`, or a network that contains one, whose stages in
                `reads` are taken; or any other stage of the network; or, for a loss that reads several, a
                dict of stages by the names in `reads`. A tap belongs to one loss; attaching again moves it.
            frozen: What is tapped does not train, on purpose: features without a gradient are accepted.

        Returns:
            The loss itself.

        Raises:
            ValueError: if `source` is none of these, lacks a stage, or contains several heads.
        """
        stages = self._stages(source)
        taps = {name: FeatureTap(module, frozen=frozen) for name, module in stages.items()}
        self.detach()
        self._taps = taps
        return self

    def _stages(self, source: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        names = self._names()
        heads = _outermost(source) if isinstance(source, nn.Module) else []
        if len(heads) > 1:
            raise ValueError(
                f"source: {type(source).__name__} contains {len(heads)} heads; attach to one of them"
            )
        if heads:  # by itself or wrapped: the output of what is around it is no stage
            source = {name: getattr(heads[0], name) for name in names if hasattr(heads[0], name)}
        elif len(names) == 1 and not isinstance(source, Mapping):
            source = {names[0]: source}
        if not isinstance(source, Mapping) or source.keys() != set(names):
            came = (
                ", ".join(source) or "none"
                if isinstance(source, Mapping)
                else type(source).__name__
            )
            raise ValueError(
                f"source: {type(self).__name__} reads {', '.join(names) or 'no features'}, got {came}; "
                "pass an EmbeddingHead that has them, or a dict of modules by these names"
            )
        return dict(source)

    def _names(self) -> tuple[str, ...]:
        return (self.reads,) if isinstance(self.reads, str) else self.reads

    def detach(self) -> Self:
        """Undo `attach`."""
        for tap in self._taps.values():
            tap.remove()
        self._taps = {}
        return self

    def clear(self) -> None:
        """Forget what the taps recorded: call it after forward passes whose loss was skipped."""
        for tap in self._taps.values():
            tap.clear()

    @property
    def taps(self) -> Mapping[str, FeatureTap]:
        """Where the features come from when `features=` is not passed, by the names in `reads`."""
        return self._taps

    @property
    def features(self) -> Any:
        """The features of the call under way, floating point tensors of at least float32."""
        if self._features is None:
            raise MissingFeaturesError("features are there only while the loss is being called")
        return self._features

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        features: Features | Mapping[str, Features] | None = None,
    ) -> Tensor:
        """The loss of a batch.

        Args:
            embeddings: (N, E).
            labels: (N,) integers.
            indices_tuple: Pairs or triplets from a PML miner.
            ref_emb: Not supported: features belong to one batch.
            ref_labels: Not supported.
            features: The features of the same N samples; default: what the tap recorded.

        Raises:
            ValueError: if the sizes do not fit, or a reference set is passed.
            MissingFeaturesError: if there are no features, or not those of this batch.
        """
        if ref_emb is not None or ref_labels is not None:
            raise ValueError(
                f"ref_emb: {type(self).__name__} compares the samples of one batch, whose features it reads; "
                "pass embeddings and labels only (and efficient=False to PML's DistributedLossWrapper)"
            )
        with self.reading(embeddings, features):
            loss: Tensor = super().forward(full_precision(embeddings), labels, indices_tuple)
            return loss

    @contextmanager
    def reading(
        self, embeddings: Tensor, features: Features | Mapping[str, Features] | None
    ) -> Iterator[None]:
        """Make `self.features` the features of `embeddings` for the length of a `with` block."""
        if features is not None:
            given = self._given(features, len(embeddings))
            for tap in self._taps.values():
                tap.pop(embeddings)  # this call serves the pass that was recorded
        elif self._taps or not self.reads:
            given = self._take(embeddings)
        else:
            wanted = self.reads if isinstance(self.reads, str) else "{...}"
            raise MissingFeaturesError(
                f"{type(self).__name__} reads features: pass features={wanted} with the embeddings, "
                "or call loss.attach(head) once"
            )
        given = {name: _raised(value) for name, value in given.items()}
        self._features = given[self.reads] if isinstance(self.reads, str) else given
        try:
            with torch.autocast(embeddings.device.type, enabled=False):
                yield
        finally:
            self._features = None

    def _given(
        self, features: Features | Mapping[str, Features], batch_size: int
    ) -> dict[str, Features]:
        if isinstance(self.reads, str):
            given: dict[str, Any] = {self.reads: features}
        elif isinstance(features, Mapping) and features.keys() == set(self.reads):
            given = dict(features)
        else:
            came = ", ".join(features) if isinstance(features, Mapping) else type(features).__name__
            raise ValueError(
                f"features: {type(self).__name__} reads {', '.join(self.reads) or 'none'}; got {came or 'none'}; "
                "pass a dict by exactly these names"
            )
        for value in given.values():
            if not are_own_rows(len(_first(value)), batch_size):
                raise ValueError(
                    f"features: expected those of the {batch_size} embeddings"
                    f"{' of all processes' if world_size() > 1 else ''}, got shape {tuple(_first(value).shape)}"
                )
        return given

    def _take(self, embeddings: Tensor) -> dict[str, Features]:
        taken: dict[str, Features] = {}
        for name, tap in self._taps.items():
            try:
                taken[name] = tap.take(embeddings)
            except MissingFeaturesError as error:
                for other in self._taps.values():  # those not asked yet recorded the same pass
                    other.pop(embeddings)
                raise MissingFeaturesError(f"{name}: {error}") from None
        return taken


def attach_all(
    loss: Loss, source: nn.Module | Mapping[str, nn.Module], *, frozen: bool = False
) -> Loss:
    """`attach` every loss inside another, a sum or a wrapper, that reads features.

    Args:
        loss: `MultipleLosses`, `DistributedLoss` or any other module.
        source: As in `FeatureLoss.attach`; of a dict each loss takes the stages that it reads.
        frozen: As in `FeatureLoss.attach`.

    Returns:
        The outer loss, as in `attach_all(MultipleLosses({...}), head)`.

    Raises:
        ValueError: if `source` lacks a stage that one of them reads; none is attached then.
    """
    readers = [part for part in loss.modules() if isinstance(part, FeatureLoss) and part.reads]
    sources = [
        {name: source[name] for name in part._names() if name in source}
        if isinstance(source, Mapping)
        else source
        for part in readers
    ]
    for part, stages in zip(readers, sources, strict=True):
        part._stages(stages)
    for part, stages in zip(readers, sources, strict=True):
        part.attach(stages, frozen=frozen)
    return loss


def _outermost(module: nn.Module) -> list[Staged]:
    """The heads in `module`, not those inside another."""
    if isinstance(module, Staged):
        return [module]
    return [head for child in module.children() for head in _outermost(child)]


def already_reduced(value: Tensor) -> dict[str, Any]:
    """A sub-loss of one number, which PML's reducers leave as it is."""
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}


def check_width(embeddings: Tensor, embedding_size: int) -> None:
    """Raise a ValueError unless the embeddings are (N, `embedding_size`)."""
    if embeddings.ndim != 2 or embeddings.shape[1] != embedding_size:
        raise ValueError(
            f"embeddings: expected (N, {embedding_size}), got shape {tuple(embeddings.shape)}; "
            "pass embedding_size=... to match the network"
        )


def _raised(features: Features) -> Features:
    if isinstance(features, tuple):
        return tuple(full_precision(part) for part in features)
    return full_precision(features)


def _trains(features: Any) -> bool:
    """Whether a gradient flows into any part: a frozen trunk's features may come with a trained tensor."""
    first = _first(features)
    parts = features if isinstance(features, tuple) else (first,)
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


def _first(features: Any) -> Tensor:
    first = features[0] if isinstance(features, tuple) and features else features
    if not isinstance(first, Tensor):
        raise ValueError(
            f"features: expected a tensor or a tuple of tensors, got {type(features).__name__}; "
            "attach the loss to a module that returns its features"
        )
    return first


def _joined(records: list[Features], batch_size: int) -> Features:
    sizes = [len(_first(record)) for record in records]
    if not are_own_rows(sum(sizes), batch_size):
        raise MissingFeaturesError(
            f"features of {' + '.join(map(str, sizes))} samples were recorded since the last call of this loss, "
            f"but the embeddings are of {batch_size}: each forward pass needs its call; after passes that were "
            f"skipped or failed, call loss.clear() (at most {FeatureTap.capacity} passes are kept)"
        )
    if len(records) == 1:
        return records[0]
    if len({_first(record).device for record in records}) > 1:
        raise MissingFeaturesError(
            "features were recorded on several devices: torch.nn.DataParallel is not supported, "
            "use DistributedDataParallel"
        )
    parts = [record if isinstance(record, tuple) else (record,) for record in records]
    joined = tuple(torch.cat(same) for same in zip(*parts, strict=True))
    return joined if isinstance(records[0], tuple) else joined[0]
