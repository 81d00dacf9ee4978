"""A sum of losses whose weights follow a schedule.

    L = sum_i w_i(step) L_i

A regularizer that reads an untrained network is best brought in slowly, and one that has done its work can
leave. Everything else is PML's `MultipleLosses`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor, nn

Weight = float | Callable[[int], float]
"""A number, or a function of the step: picklable, so no lambda."""


@dataclass(frozen=True)
class _Ramp(ABC):
    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")

    def __call__(self, step: int) -> float:
        share = self._share(min(step / self.steps, 1.0))
        return (1 - share) * self.start + share * self.end  # exact at both ends

    @abstractmethod
    def _share(self, passed: float) -> float: ...


class LinearRamp(_Ramp):
    """From `start` to `end` along a line; `end` from step `steps` on.

    Example:
        >>> warm_up = LinearRamp(0.0, 0.5, steps=1000)
        >>> warm_up(0), warm_up(500), warm_up(2000)
        (0.0, 0.25, 0.5)
    """

    def _share(self, passed: float) -> float:
        return passed


class CosineRamp(_Ramp):
    """From `start` to `end` along half a cosine, flat at both ends; `end` from step `steps` on.

    Example:
        >>> decay = CosineRamp(1.0, 0.0, steps=1000)
        >>> decay(0), round(decay(250), 3), decay(1000)
        (1.0, 0.854, 0.0)
    """

    def _share(self, passed: float) -> float:
        return (1 - math.cos(math.pi * passed)) / 2


class ScheduledLosses(MultipleLosses):
    """PML's `MultipleLosses` with weights that may change from step to step.

    A step is a call in training mode with gradients enabled; steps are counted in the buffer `step`,
    which is saved with the `state_dict`. Where calls are not steps, as when gradients are accumulated
    over several batches, call `set_step` before each. A loss of weight 0 is still computed, so that taps
    are read, own parameters get a gradient, zero, on every process, and NaN shows.

    The weights of the last call are `weights`, and for record-keeper the attributes `weight_NAME`.

    Args:
        losses: Losses by name, or a list of them.
        miners: As in `MultipleLosses`: a miner for each or some of the losses.
        weights: For each loss a number, `LinearRamp`, `CosineRamp`, or any picklable function of the
            step. Default: 1 each.

    Raises:
        ValueError: if the names or the number of the weights are not those of the losses.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = ScheduledLosses(
        ...     {"metric": losses.TripletMarginLoss(), "pairs": losses.ContrastiveLoss()},
        ...     weights={"metric": 1.0, "pairs": LinearRamp(0.0, 0.5, steps=10)},
        ... )
        >>> for _ in range(6):
        ...     value = loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        >>> loss.weights
        {'metric': 1.0, 'pairs': 0.25}
    """

    step: Tensor

    def __init__(
        self,
        losses: Mapping[str, nn.Module] | Sequence[nn.Module],
        miners: Mapping[str, nn.Module] | Sequence[nn.Module | None] | None = None,
        weights: Mapping[str, Weight] | Sequence[Weight] | None = None,
    ) -> None:
        keys = _keys(losses)
        if weights is not None and set(_keys(weights)) != set(keys):
            raise ValueError(
                f"weights: expected one for each of {', '.join(map(str, keys))}, got "
                f"{', '.join(map(str, _keys(weights))) or 'none'}"
            )
        super().__init__(
            dict(losses) if isinstance(losses, Mapping) else losses,
            dict(miners) if isinstance(miners, Mapping) else miners,
        )
        # No dict: record-keeper would look for records in its values.
        self._schedules = [(key, 1.0 if weights is None else weights[key]) for key in keys]
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self._set_weights()
        c_f.add_to_recordable_attributes(self, list_of_names=[f"weight_{key}" for key in keys])

    def set_step(self, step: int) -> None:
        """Make the next call that of step `step`; counting goes on from there."""
        self.step.fill_(step)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        self._set_weights()
        total: Tensor = super().forward(embeddings, labels, indices_tuple)
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return total

    def _set_weights(self) -> None:
        scheduled = any(callable(weight) for _, weight in self._schedules)
        step = int(self.step) if scheduled else 0  # to read it makes a GPU wait
        weights = {
            key: weight(step) if callable(weight) else weight for key, weight in self._schedules
        }
        self.weights: dict[Any, float] | list[float] = (
            weights if self.is_dict else list(weights.values())
        )
        for key, weight in weights.items():
            setattr(self, f"weight_{key}", weight)


def _keys(values: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    return list(values) if isinstance(values, Mapping) else list(range(len(values)))
