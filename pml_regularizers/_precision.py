"""Casts for losses, which divide, exponentiate and sum over all pairs: half precision becomes float32 first.

Integers are not to be cast: half precision rounds them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def full_precision(x: Tensor) -> Tensor:
    """`x`, raised to float32 if it is in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context that switches autocast off on the device of `x`; free where it is off."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def as_parameters(x: Tensor, module: nn.Module) -> Tensor:
    """`x` in the precision of a module's parameters; PML would recast the parameters, in place."""
    own = next(module.parameters(), None)
    if own is None or own.dtype not in (torch.float32, torch.float64):
        return x
    return x.to(own.dtype)


def integer_fault(x: Tensor) -> str | None:
    """The fault of a tensor that should hold signed integers; None if it does."""
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return None
    return f"expected signed integers, got {x.dtype}; cast only floating tensors, since others are rounded"


class CheckedIntegers:
    """Checks what is loaded into a module's own buffers of integers: torch would silently round floats.

    Stands before the `nn.Module` among the bases.
    """

    _buffers: dict[str, Tensor | None]

    def buffer_fault(self, saved: Tensor) -> str | None:
        """The fault of a saved tensor that has the shape of its buffer; None if it has none."""
        return integer_fault(saved)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, errors = args
        before = len(errors)
        for name, buffer in self._buffers.items():
            saved = state_dict.get(prefix + name)
            if buffer is None or buffer.is_floating_point() or not isinstance(saved, Tensor):
                continue
            fault = None
            if saved.layout is not torch.strided:
                fault = f"expected a dense tensor, got {saved.layout}; load its to_dense()"
            elif saved.shape == buffer.shape:
                fault = self.buffer_fault(saved)
            if fault is not None:
                errors.append(f"{prefix}{name}: {fault}")
        if len(errors) == before:
            super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
