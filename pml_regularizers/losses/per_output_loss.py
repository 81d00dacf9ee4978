"""Base of losses that apply a loss to several outputs: HORDE's orders, an ensemble's heads."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.losses import CrossBatchMemory, SelfSupervisedLoss
from pytorch_metric_learning.reducers import DoNothingReducer
from torch import Tensor, nn

from ..distributed import DistributedLoss
from ..features.feature_loss import FeatureLoss, Given
from ..features.feature_tap import ThreadStack
from ..functional.checks import Around, check_classes, check_module, class_count
from ..functional.precision import call_in_full_precision

_masks = ThreadStack()
"""The `enqueue_mask` of each call under way."""


class PerOutputLoss(FeatureLoss, Around):
    """A PML loss for each of several outputs, by name; each gives one number.

    A subclass calls `hold_losses` in its constructor, and `sub_loss` for each name in `compute_loss`. The first
    output has the given loss itself: what it offers, such as `get_logits`, is offered here too. With
    `collect_stats`, each value is recorded as NAME_loss.

    Args:
        **kwargs: As in any PML loss, except `reducer` and `distance`, which belong to the losses inside.
    """

    nested_feature_loss_hint = ""
    """Why a loss inside cannot read features itself, and what to do instead."""

    inner_place = "for inner in loss.losses.values(): inner"

    width_hint = ""
    """What else would help if a loss was made for vectors of another width."""

    def __init__(self, **kwargs: Any) -> None:
        for name in ("reducer", "distance"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"{name}: the wrapped loss has its own; pass it there, as in "
                    f"{type(self).__name__}(ContrastiveLoss({name}=...), ...)"
                )
        super().__init__(**kwargs)

    def get_default_distance(self) -> None:
        """Return None: nothing uses it."""

    def check_wrapped(self, name: str, loss: Any) -> None:
        """Raise ValueError, about argument `name`, unless this is a loss that returns one number."""
        check_module(name, loss, "pass a PML loss")
        for module in loss.modules():
            if isinstance(module, FeatureLoss) and module.feature_names:
                raise ValueError(
                    f"{name}: {type(module).__name__} reads features {self.nested_feature_loss_hint}"
                )
            reasons = {
                SelfSupervisedLoss: "takes two sets of embeddings; pass the loss in it",
                DistributedLoss: f"goes around, as in DistributedLoss({type(self).__name__}(...))",
                DoNothingReducer: "does not return one number; use another reducer",
            }
            for refused, reason in reasons.items():
                if isinstance(module, refused):
                    raise ValueError(f"{name}: {refused.__name__} {reason}")

    def hold_losses(self, losses: Mapping[str, nn.Module]) -> None:
        """Keep the losses by name: each object itself, and a copy of it wherever it comes again."""
        # First, since a loss inside may have such records itself.
        self.add_to_recordable_attributes(
            list_of_names=[f"{name}_loss" for name in losses], is_stat=True
        )
        # By name, not in a ModuleList: record-keeper names its tables after them, and "0" is no table name.
        self.losses = nn.ModuleDict()
        for name, loss in losses.items():
            self.losses[name] = copy.deepcopy(loss) if loss in self.losses.values() else loss

    def _inner(self) -> nn.Module | None:
        losses = self.__dict__.get("_modules", {}).get("losses") or {}
        return next(iter(losses.values()), None)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        features: Given | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        """As in `FeatureLoss`.

        Args:
            enqueue_mask: (N,) booleans, for the losses inside that are, or have, PML's CrossBatchMemory.

        Raises:
            ValueError: if none of them takes it.
        """
        if enqueue_mask is not None and not _takes(self, "enqueue_mask"):
            kinds = dict.fromkeys(type(loss).__name__ for loss in self.losses.values())
            raise ValueError(
                f"enqueue_mask: {type(self).__name__} hands it on, and no loss inside ({', '.join(kinds)}) takes "
                "it; leave it out"
            )
        _masks.stack.append(enqueue_mask)
        try:
            return super().forward(
                embeddings, labels, indices_tuple, ref_emb, ref_labels, features=features
            )
        finally:
            _masks.stack.pop()

    def sub_loss(
        self,
        name: str,
        vectors: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        **reference: Any,
    ) -> Tensor:
        """Compute and record the value of the loss `name`.

        Raises:
            ValueError: for tuples beside a memory; for labels that are no classes of a loss that has some; if a
                loss with a state, such as proxies, fails on the vectors.
        """
        loss = self.losses[name]
        has_memory = any(isinstance(module, CrossBatchMemory) for module in loss.modules())
        if has_memory and indices_tuple is not None:
            raise ValueError(
                "indices_tuple: CrossBatchMemory would take a batch's tuples for rows of its memory; give it "
                f"the miner, as in {type(self).__name__}(CrossBatchMemory(loss, E, miner=...), ...)"
            )
        for module in loss.modules():
            if count := class_count(module):
                check_classes(type(module).__name__, labels, count)
        for key in reference:
            if not _takes(loss, key):
                raise ValueError(f"{key}: {type(loss).__name__} takes none; leave it out")
        if _masks.stack and _masks.stack[-1] is not None and _takes(loss, "enqueue_mask"):
            reference["enqueue_mask"] = _masks.stack[-1]
        try:
            value = call_in_full_precision(loss, vectors, labels, indices_tuple, **reference)
            value = value.view(())
        except RuntimeError as error:
            device = (torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", ()))
            if isinstance(error, device) or not loss.state_dict():
                raise
            raise ValueError(
                f"loss: {type(loss).__name__} failed on the vectors {tuple(vectors.shape)} of {name} ({error}); "
                f"where it has an embedding_size, that must be {vectors.shape[1]}{self.width_hint}"
            ) from error
        if len(vectors) == 0:  # a classification loss is a mean over images
            value = value.nan_to_num()
        if self.collect_stats:
            setattr(self, f"{name}_loss", value.detach().item())
        return value


def _takes(loss: nn.Module, name: str) -> bool:
    """True if a loss may be called with an argument of this name."""
    if isinstance(loss, PerOutputLoss) and name == "enqueue_mask":
        return any(_takes(inner, name) for inner in loss.losses.values())
    parameters = inspect.signature(loss.forward).parameters
    return name in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())
