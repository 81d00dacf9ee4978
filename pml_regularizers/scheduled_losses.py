"""Sum of losses whose weights follow a schedule.

    L = sum_i w_i(step) L_i

A regularizer is best faded in slowly if it reads an untrained network, and may be faded out once it has done its
work. Everything else is PML's `MultipleLosses`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor, nn

from ._precision import CheckedIntegers

Weight = float | Callable[[int], float]
"""A number, or a function of the step; it must be picklable, so no lambda."""


@dataclass(frozen=True)
class LinearRamp:
    """Schedule from `start` to `end` along a line; `end` from step `steps` on.

    Example:
        >>> warm_up = LinearRamp(0.0, 0.5, steps=1000)
        >>> warm_up(0), warm_up(500), warm_up(2000)
        (0.0, 0.25, 0.5)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")
        for name in ("start", "end"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name}: expected a finite number, got {value}")

    def __call__(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        return (1 - share) * self.start + share * self.end  # exact at both ends


class ScheduledLosses(CheckedIntegers, MultipleLosses):
    """PML's `MultipleLosses`, with weights that may change from step to step.

    A step is a call in training mode with gradients enabled. The buffer `step` counts them and is saved with the
    `state_dict`. If calls are not steps, as when gradients are accumulated over several batches, call `set_step`
    before each call. A loss of weight 0 is still computed: its taps are read, its own parameters get a zero
    gradient on every process, and a NaN still shows.

    `weights` holds the weights of the last call; the attributes `weight_NAME` hold them for record-keeper. You
    may change a number, `loss.weights["pairs"] = 0.1`; no `state_dict` saves the change, and a schedule
    overwrites it.

    Args:
        losses: Losses by name, or a list of them.
        miners: As in `MultipleLosses`: miners for all or some of the losses.
        weights: For each loss a number, `LinearRamp`, or any picklable function of the step. Default:
            1 each.

    Raises:
        ValueError: if the names or the number of weights or miners do not match the losses, or a weight is
            neither a number nor a function.

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
        _check_losses(losses)
        if miners is not None:
            _check_keys("miners", miners, losses, all_needed=not isinstance(losses, Mapping))
        if weights is not None:
            _check_keys("weights", weights, losses)
        super().__init__(
            dict(losses) if isinstance(losses, Mapping) else losses,
            dict(miners) if isinstance(miners, Mapping) else miners,
        )
        keys = _keys(losses)
        found: dict[Any, Any] = {key: 1.0 if weights is None else weights[key] for key in keys}
        for key, weight in found.items():
            if not isinstance(weight, Real) and not callable(weight):
                raise ValueError(
                    f"weights: expected a number or a function of the step for {key}, got {weight!r}"
                )
        # Not a dict: record-keeper would look for records in its values.
        self._schedules = [(key, weight) for key, weight in found.items() if callable(weight)]
        self.weights: Any = found if self.is_dict else list(found.values())
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self._set_weights()
        c_f.add_to_recordable_attributes(self, list_of_names=[f"weight_{key}" for key in keys])

    def set_step(self, step: int) -> None:
        """Make `step` the number of the next call; counting continues from there."""
        self.step.fill_(step)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        if self.miners and indices_tuple is not None:
            raise ValueError("indices_tuple: the losses have miners of their own; pass no tuples")
        weights = self._set_weights()
        total: Any = 0
        for key, loss in self.losses.items() if self.is_dict else enumerate(self.losses):
            mined = self.get_indices_tuple(key, embeddings, labels, indices_tuple)
            total = total + loss(embeddings, labels, mined) * weights[key]
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return cast(Tensor, total)

    def _set_weights(self) -> dict[Any, Any]:
        """Set the weights, and return this call's own copy: other threads may change those on the object."""
        weights = dict(self.weights.items() if self.is_dict else enumerate(self.weights))
        if self._schedules:
            step = int(self.step)  # makes a GPU wait
            weights.update((key, schedule(step)) for key, schedule in self._schedules)
        for key, weight in weights.items():
            self.weights[key] = weight
            setattr(self, f"weight_{key}", weight)
        return weights


def _keys(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Mapping) else list(range(len(values)))


def _check_losses(losses: Any) -> None:
    if not isinstance(losses, (Mapping, Sequence, nn.ModuleList)):
        raise ValueError(
            f"losses: expected a dict or a list of losses, got {type(losses).__name__}; pass "
            '{"metric": loss, ...}, and a ModuleDict as dict(modules.items())'
        )


def _check_keys(name: str, values: Any, losses: Any, *, all_needed: bool = True) -> None:
    """Raise a ValueError unless the values are a dict or list like the losses, with all or some of their keys."""
    kind, word = (Mapping, "dict") if isinstance(losses, Mapping) else (Sequence, "list")
    keys = _keys(losses)
    if isinstance(values, kind):
        found = _keys(values)
        if set(found) <= set(keys) and (len(found) == len(keys) or not all_needed):
            return
        came = ", ".join(map(str, found)) or "none"
    else:
        came = type(values).__name__
    raise ValueError(
        f"{name}: expected a {word} with one for {'each' if all_needed else 'some'} of "
        f"{', '.join(map(str, keys))}, got {came}"
    )
