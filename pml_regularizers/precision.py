"""Losses divide, exponentiate and sum over all pairs: half precision is raised before they do."""

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """`x`, raised to float32 if it is of half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
