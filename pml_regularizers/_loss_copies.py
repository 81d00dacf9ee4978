"""Base of losses that hold copies of other losses: HORDE's orders, an ensemble's heads."""

import copy
from collections.abc import Mapping
from typing import Any

from pytorch_metric_learning.losses import CrossBatchMemory, SelfSupervisedLoss
from pytorch_metric_learning.reducers import DoNothingReducer
from torch import Tensor, nn

from ._precision import as_parameters
from .distributed import DistributedLoss
from .feature_loss import FeatureLoss


class WrapperLoss(FeatureLoss):
    """Deep copies of PML losses by name, each of which gives one number.

    A subclass calls `hold` in its constructor, and `part` for each name in `compute_loss`. Only the copies are
    trained. With `collect_stats`, each value is recorded as NAME_loss.

    Args:
        **kwargs: As in any PML loss, except `reducer` and `distance`, which belong to the wrapped losses.
    """

    cannot_read = ""
    """End of the error message: why a wrapped loss cannot read features itself, and what to do instead."""

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
        """Refuse, as argument `name`, anything except a loss that returns one number.

        Raises:
            ValueError: for another object, a loss that reads features, a DistributedLoss or a DoNothingReducer.
        """
        if not isinstance(loss, nn.Module):
            raise ValueError(f"{name}: expected a PML loss, got {type(loss).__name__}")
        if isinstance(loss, SelfSupervisedLoss):
            raise ValueError(
                f"{name}: expected a loss of embeddings and labels, got SelfSupervisedLoss, which takes two sets "
                f"of embeddings; pass the {type(loss.loss).__name__} in it, join the two sets, and number the "
                "images as labels"
            )
        for module in loss.modules():
            if isinstance(module, FeatureLoss) and module.feature_names:
                raise ValueError(
                    f"{name}: {type(module).__name__} reads features {self.cannot_read}"
                )
            if isinstance(module, DistributedLoss):
                wrapper = type(self).__name__
                raise ValueError(
                    f"{name}: DistributedLoss goes around, as in DistributedLoss({wrapper}(loss, ...))"
                )
            if isinstance(module, DoNothingReducer):
                raise ValueError(
                    f"{name}: expected a loss that returns one number, got one with DoNothingReducer; use "
                    "another reducer"
                )

    def hold(self, losses: Mapping[str, nn.Module]) -> None:
        """Copy these losses."""
        # By name, not in a ModuleList: record-keeper names its tables after them, and "0" is no table name.
        self.losses = nn.ModuleDict({name: copy.deepcopy(loss) for name, loss in losses.items()})
        self._has_memory = any(isinstance(part, CrossBatchMemory) for part in self.losses.modules())
        self.add_to_recordable_attributes(
            list_of_names=[f"{name}_loss" for name in losses], is_stat=True
        )

    def check_tuples(self, indices_tuple: tuple[Tensor, ...] | None) -> None:
        """Refuse tuples that a memory would misread.

        Raises:
            ValueError: if there are tuples and a wrapped loss has a CrossBatchMemory.
        """
        if indices_tuple is not None and self._has_memory:
            raise ValueError(
                "indices_tuple: CrossBatchMemory would take a batch's tuples for rows of its memory; give it "
                f"the miner, as in {type(self).__name__}(CrossBatchMemory(loss, E, miner=...), ...)"
            )

    def part(
        self,
        name: str,
        vectors: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
    ) -> Tensor:
        """Compute and record the value of the copy `name`."""
        loss = self.losses[name]
        value: Tensor = loss(as_parameters(vectors, loss), labels, indices_tuple).view(())
        if len(vectors) == 0:  # a classification loss is a mean over images
            value = value.nan_to_num()
        if self.collect_stats:
            setattr(self, f"{name}_loss", value.detach().item())
        return value
