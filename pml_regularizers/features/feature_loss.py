"""Losses that read a network's intermediate features.

pytorch-metric-learning (PML) calls `loss(embeddings, labels, indices_tuple)`. The features of a loss that reads
more are those of the call, `loss(embeddings, labels, features=feature_map)`, or else those that a tap recorded:
`loss.attach(head)`, once, and trainers, testers, miners and `MultipleLosses` work unchanged.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self, TypeVar

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import MeanReducer, SumReducer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed import matches_batch, world_size
from ..functional.checks import OwnArguments, came, check_batch, check_module
from ..functional.precision import full_precision, without_autocast
from ..unoptimized import watch
from .feature_maps import FeatureModule, first_tensor
from .feature_tap import Features, FeatureTap, MissingFeaturesError, ThreadStack

Loss = TypeVar("Loss", bound=nn.Module)
Source = nn.Module | Mapping[str, nn.Module]
Given = Features | Mapping[str, Features]

_calls = ThreadStack()
"""The losses being called in this thread, with their features."""


class FeatureLoss(OwnArguments, BaseMetricLossFunction):
    """Base of the losses that read features besides the embeddings.

    Half-precision inputs are raised to float32 and autocast is off inside; the loss's parameters are never recast.
    Subclasses name what they read in `feature_names`, and find it as `self.features` in `compute_loss`.
    Several threads may call one loss at once; statistics (`collect_stats`) are those of the last call.
    """

    feature_names: tuple[str, ...] = ("feature_map",)
    """Stages of an `EmbeddingHead` that `attach(head)` taps; empty if the loss reads none."""

    frozen_features = False
    """True if features that are passed carry no gradient on purpose, and nothing is to be told of it."""

    compares_classes = False
    """True for a regularizer that needs labels; the slot `embedding_regularizer=` of a PML loss passes none."""

    takes_reference = False
    """True if `ref_emb` and `ref_labels` reach `compute_loss`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tap: FeatureTap | None = None
        """Source of the features when `features=` is not passed."""

    def attach(
        self,
        source: Source,
        *,
        embedder: nn.Module | None = None,
        frozen: bool = False,
        pool: Literal["avg"] | None = None,
    ) -> Self:
        """From now on, read the features from a module's output instead of `features=`.

        Args:
            source: An `EmbeddingHead` or `AttentionEnsemble`, or a network that contains one: its stages named in
                `feature_names` are tapped. Or any other stage of the network. Or, for a loss that reads several
                features, a dict of stages by the names in `feature_names`. Attaching again moves the tap.
            embedder: The module that returns the embeddings, where no `EmbeddingHead` does: the network itself, or
                the module that comes after the stage.
            frozen: Accept features without a gradient, because the tapped stage is frozen on purpose.
            pool: "avg" averages a map (N, C, H, W), or tokens, over their positions, for a loss that reads pooled
                features. Padding counts as well, except in an `EmbeddingHead` that gets the mask.

        Returns the loss itself.

        Raises:
            ValueError: if `source` is none of these, lacks a stage, or contains several heads; without an
                `embedder`, if its stages are no children of an `EmbeddingHead`; for a `pool` without a use.
        """
        stages = self._stages(source)
        if pool is not None and "pooled" not in stages:
            raise ValueError(
                f"pool: {type(self).__name__} reads {', '.join(stages)}, which is not pooled; leave it out"
            )
        tap = FeatureTap(stages, embedder=embedder, frozen=frozen, pool=pool)
        self.detach().tap = tap
        return self

    def _stages(self, source: Source) -> dict[str, nn.Module]:
        names = self.feature_names
        if not names:
            raise ValueError(
                f"source: {type(self).__name__} reads the embeddings of the call, there is nothing to attach; "
                "leave attach out"
            )
        heads = _outermost(source) if isinstance(source, nn.Module) else []
        if len(heads) > 1:
            raise ValueError(
                f"source: {type(source).__name__} contains {len(heads)} heads; attach to one of them"
            )
        if heads:  # by itself or wrapped: the wrapper's output is no stage
            source = {name: getattr(heads[0], name) for name in names if hasattr(heads[0], name)}
        elif len(names) == 1 and not isinstance(source, Mapping):
            source = {names[0]: source}
        if not isinstance(source, Mapping) or source.keys() != set(names):
            raise ValueError(
                f"source: {type(self).__name__} reads {', '.join(names)}, got "
                f"{_named(source)}; pass an EmbeddingHead that has them, or a dict of modules by these names"
            )
        return dict(source)

    def detach(self) -> Self:
        """Undo `attach`."""
        if self.tap is not None:
            self.tap.remove()
        self.tap = None
        return self

    def clear(self) -> None:
        """Forget what the tap recorded: frees the memory of passes whose loss was skipped."""
        if self.tap is not None:
            self.tap.clear()

    @property
    def features(self) -> Any:
        """The features of the call under way, floating point tensors of at least float32; None outside a call.

        Those of the only name in `feature_names`, or a dict by these names.
        """
        named = self.named_features
        return next(iter(named.values())) if named and len(named) == 1 else named

    @property
    def named_features(self) -> Any:
        """The same, always a dict by the names in `feature_names`; None outside a call."""
        calls = _calls.stack
        return calls[-1][1] if calls and calls[-1][0] is self else None

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        features: Given | None = None,
    ) -> Tensor:
        """The loss of a batch.

        Args:
            embeddings, labels: (N, E), and (N,) integers.
            indices_tuple: Pairs or triplets from a PML miner.
            ref_emb, ref_labels: A reference set, which only `EnsembleLoss` takes: features belong to one batch.
            features: The features of the same N samples, with their gradient, or a dict of them by the names in
                `feature_names`; default: what the tap recorded in the pass that made the embeddings.

        Raises:
            ValueError: if the sizes do not fit, or a reference set is passed.
            MissingFeaturesError: if there are no features, or those of another pass.
        """
        if not (self.takes_reference or (ref_emb is None and ref_labels is None)):
            raise ValueError(
                f"ref_emb: {type(self).__name__} reads one batch, and no reference set; pass embeddings and labels "
                "only (and efficient=False to PML's DistributedLossWrapper)"
            )
        if labels is None and self.compares_classes:
            raise ValueError(
                f"labels: {type(self).__name__} compares classes, and the slot embedding_regularizer= passes "
                'none; add it to the loss instead: MultipleLosses({"metric": loss, "regularizer": regularizer})'
            )
        check_batch(embeddings, labels, indices_tuple)
        reference: tuple[Any, ...] = ()
        if ref_emb is not None:
            check_batch(ref_emb, ref_labels, kind="ref_")
            reference = full_precision(ref_emb), ref_labels
        watch(self, embeddings)
        with self.reading(embeddings, features):
            loss: Tensor = super().forward(
                full_precision(embeddings), labels, indices_tuple, *reference
            )
            return loss

    @contextmanager
    def reading(self, embeddings: Tensor, features: Given | None) -> Iterator[None]:
        """Set `self.features` to the features of `embeddings` inside a `with` block."""
        if features is not None:
            given = self._by_name(features)
            self._tell_frozen(given, embeddings)
            if self.tap is not None:
                self.tap.pop(embeddings)  # this call is for the recorded pass
        elif not self.feature_names:
            given = {}
        elif self.tap is not None:
            given = self.tap.take(embeddings)
        else:
            wanted = self.feature_names[0] if len(self.feature_names) == 1 else "{...}"
            raise MissingFeaturesError(
                f"{type(self).__name__} reads features: pass features={wanted} with the embeddings, "
                "or call loss.attach(head) once (inside MultipleLosses, which hands no features on, only that)"
            )
        for name, value in given.items():
            first = first_tensor(value)
            if not first.is_floating_point():
                raise ValueError(
                    f"features: expected floating point numbers of {name}, got {came(first)}; read what a layer "
                    "returns, and no token numbers or indices"
                )
            if not matches_batch(len(first), len(embeddings)):
                raise MissingFeaturesError(
                    f"features: expected {name} of the {len(embeddings)} embeddings"
                    f"{' of all processes' if world_size() > 1 else ''}, got shape {tuple(first.shape)}; call the "
                    "loss with embeddings and features of the same samples, and of whole passes"
                )
        _calls.stack.append((self, tree_map(full_precision, given)))
        try:
            with without_autocast(embeddings):
                yield
        finally:
            _calls.stack.pop()

    def _by_name(self, features: Given) -> dict[str, Any]:
        names = self.feature_names
        if isinstance(features, Mapping) and features.keys() == set(names):
            return dict(features)
        if len(names) == 1:
            return {names[0]: features}
        raise ValueError(
            f"features: {type(self).__name__} reads {', '.join(names) or 'none'}; got {_named(features)}; "
            "pass a dict by exactly these names"
        )

    def _tell_frozen(self, features: Mapping[str, Any], embeddings: Tensor) -> None:
        """Warn once of passed features that have no gradient where the embeddings have one."""
        learning = self.training and embeddings.requires_grad and torch.is_grad_enabled()
        if self.frozen_features or not learning or torch.compiler.is_compiling():
            return
        for name, value in features.items():
            if not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(value)):
                self.frozen_features = True
                warnings.warn(
                    f"features: {name} carry no gradient, but the embeddings do: {type(self).__name__} does not "
                    "train what made them; compute them outside torch.no_grad and without detach(), or, where "
                    "they are frozen on purpose, set loss.frozen_features = True",
                    stacklevel=2,
                )


def attach_all(
    loss: Loss,
    source: Source,
    *,
    embedder: nn.Module | None = None,
    frozen: bool = False,
    pool: Literal["avg"] | None = None,
) -> Loss:
    """Call `attach` on every loss that reads features inside another loss, such as a sum or a wrapper.

    Args:
        loss: `MultipleLosses`, `DistributedLoss` or any other module.
        source, embedder, frozen, pool: As in `FeatureLoss.attach`; from a dict, each loss takes the stages that it
            reads.

    Returns the outer loss.

    Raises:
        ValueError: as `FeatureLoss.attach`, if one of them cannot be attached; then none is.
    """
    check_module("loss", loss)
    taps: dict[FeatureLoss, FeatureTap] = {}
    for part in loss.modules():
        if isinstance(part, FeatureLoss) and part.feature_names:
            own = source
            if isinstance(source, Mapping):
                own = {name: source[name] for name in part.feature_names if name in source}
            stages = part._stages(own)
            taps[part] = FeatureTap(stages, embedder=embedder, frozen=frozen, pool=pool)
    for part, tap in taps.items():
        part.detach().tap = tap
    return loss


def _named(value: Any) -> str:
    """What came instead of modules or features by name."""
    return (", ".join(value) or "none") if isinstance(value, Mapping) else type(value).__name__


def _outermost(module: nn.Module) -> list[FeatureModule]:
    """The heads in `module`, except those inside another head."""
    if isinstance(module, FeatureModule):
        return [module]
    return [head for child in module.children() for head in _outermost(child)]


def waits(x: Tensor) -> bool:
    """True where Python cannot look at values, in compiled code, or would have to wait for them, on a GPU."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def sums_at_once(reducer: Any, x: Tensor) -> bool:
    """True if a mean or a sum shall get no list of terms, whose length the labels decide: it `waits` for these."""
    return waits(x) and type(reducer) in (MeanReducer, SumReducer) and not reducer.collect_stats


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
