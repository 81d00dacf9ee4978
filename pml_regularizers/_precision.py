"""Casts for losses, which divide, exponentiate and sum over all pairs: half precision becomes float32 first.

Integers are not to be cast: half precision rounds them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

HALF = (torch.float16, torch.bfloat16)


def full_precision(x: Tensor) -> Tensor:
    """`x`, raised to float32 if it is in half precision."""
    return x.float() if x.dtype in HALF else x


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context that switches autocast off on the device of `x`; free where it is off."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def call_in_full_precision(loss: nn.Module, vectors: Tensor, *args: Any) -> Tensor:
    """The value of a PML loss in the precision of its parameters, or in float32 if that is half.

    The parameters keep their precision: PML would recast them in place to that of the vectors.
    """
    raised = {name: full_precision(own) for name, own in loss.named_parameters()}
    if raised:
        vectors = vectors.to(next(iter(raised.values())).dtype)
    if any(own.dtype in HALF for own in loss.parameters()):
        value: Tensor = functional_call(loss, raised, (vectors, *args))
    else:
        value = loss(vectors, *args)
    return value


def integer_fault(x: Tensor) -> str | None:
    """The fault of a tensor that should hold signed integers; None if it does."""
    if x.dtype.is_signed and not x.is_floating_point():
        return None
    return f"expected signed integers, got {x.dtype}; cast only floating tensors, since others are rounded"


class CheckedIntegers:
    """Refuses floats for a module's own buffers of integers in `load_state_dict`, where torch would round them.

    Stands before the `nn.Module` among the bases.
    """

    _buffers: dict[str, Tensor | None]

    def buffer_fault(self, saved: Tensor) -> str | None:
        """The fault of a saved tensor; None if it has none."""
        return integer_fault(saved)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, errors = args
        tables = [
            name
            for name, own in self._buffers.items()
            if own is not None and not own.is_floating_point()
        ]
        faults = {
            name: self.buffer_fault(state_dict[prefix + name])
            for name in tables
            if prefix + name in state_dict
        }
        errors += [f"{prefix}{name}: {fault}" for name, fault in faults.items() if fault]
        if not any(faults.values()):
            super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
