"""Casts for losses, which divide, exponentiate and sum over all pairs: half precision becomes float32 first."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

HALF = (torch.float16, torch.bfloat16)


def full_precision(x: Tensor) -> Tensor:
    """`x`, raised to float32 if it is in half precision."""
    return x.float() if x.dtype in HALF else x


def device_for(dtype: torch.dtype, device: torch.device) -> torch.device:
    """The device, or the CPU if it lacks numbers of this type: Apple's, and some of Intel's, have no float64."""
    if dtype not in (torch.float64, torch.complex128):
        return device
    lacks = device.type == "mps"
    if device.type == "xpu":
        lacks = not torch.xpu.get_device_properties(device).has_fp64
    return torch.device("cpu") if lacks else device


def in_float64(x: Tensor) -> Tensor:
    """`x` in float64: on its device, or on the CPU if the device has none, which waits for it."""
    return x.to(device_for(torch.float64, x.device), torch.float64)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context that switches autocast off on the device of `x`; free where it is off.

    PyTorch 2.4 has no autocast on Apple's GPU, and refuses to be asked for it.
    """
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def call_in_full_precision(loss: nn.Module, vectors: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The value of a PML loss in the precision of its parameters, or in float32 if that is half.

    The parameters keep their precision: PML would recast them in place to that of the vectors.
    """
    raised = {name: full_precision(own) for name, own in loss.named_parameters()}
    if raised:
        dtype = next(iter(raised.values())).dtype
        vectors = vectors.to(dtype)
        kwargs = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in kwargs.items()
        }
    if any(own.dtype in HALF for own in loss.parameters()):
        value: Tensor = functional_call(loss, raised, (vectors, *args), kwargs)
    else:
        value = loss(vectors, *args, **kwargs)
    return value
