"""Base of losses that hold copies of other losses: HORDE's orders, an ensemble's heads."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.losses import CrossBatchMemory, SelfSupervisedLoss
from pytorch_metric_learning.reducers import DoNothingReducer
from torch import Tensor, nn

from ..distributed import DistributedLoss
from ..features.feature_loss import FeatureLoss
from ..functional.precision import call_in_full_precision


class PerOutputLoss(FeatureLoss):
    """A copy of a PML loss for each of several outputs, by name; each copy gives one number.

    A subclass calls `copy_losses` in its constructor, and `sub_loss` for each name in `compute_loss`. Only the
    copies are trained. With `collect_stats`, each value is recorded as NAME_loss.

    Args:
        **kwargs: As in any PML loss, except `reducer` and `distance`, which belong to the copied losses.
    """

    nested_feature_loss_hint = (
        ""  # why a copied loss cannot read features itself, and what to do instead
    )
    width_hint = ""  # what else would help if a copy was made for vectors of another width

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
        if not isinstance(loss, nn.Module):
            raise ValueError(f"{name}: expected a PML loss, got {type(loss).__name__}")
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

    def copy_losses(self, losses: Mapping[str, nn.Module]) -> None:
        # By name, not in a ModuleList: record-keeper names its tables after them, and "0" is no table name.
        self.losses = nn.ModuleDict({name: copy.deepcopy(loss) for name, loss in losses.items()})
        self.add_to_recordable_attributes(
            list_of_names=[f"{name}_loss" for name in losses], is_stat=True
        )

    def sub_loss(
        self,
        name: str,
        vectors: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
    ) -> Tensor:
        """Compute and record the value of the copy `name`.

        Raises:
            ValueError: for tuples beside a memory; if a copy with a state, such as proxies, fails on the vectors.
        """
        loss = self.losses[name]
        has_memory = any(isinstance(module, CrossBatchMemory) for module in loss.modules())
        if has_memory and indices_tuple is not None:
            raise ValueError(
                "indices_tuple: CrossBatchMemory would take a batch's tuples for rows of its memory; give it "
                f"the miner, as in {type(self).__name__}(CrossBatchMemory(loss, E, miner=...), ...)"
            )
        try:
            value = call_in_full_precision(loss, vectors, labels, indices_tuple).view(())
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or not loss.state_dict():
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
