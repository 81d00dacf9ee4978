"""Casts for losses, which divide, exponentiate and sum over all pairs: half precision becomes float32 first."""

import torch
from torch import Tensor, nn


def full_precision(x: Tensor) -> Tensor:
    """`x`, raised to float32 if it is in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_parameters(x: Tensor, module: nn.Module) -> Tensor:
    """`x` in the precision of a module's parameters; PML would recast the parameters, in place."""
    own = next(module.parameters(), None)
    if own is None or own.dtype not in (torch.float32, torch.float64):
        return x
    return x.to(own.dtype)
