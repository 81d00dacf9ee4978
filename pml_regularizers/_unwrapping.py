"""Wrappers around a loss or a network, such as DDP's, which must not change its parameters' names."""

from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from .distributed import DistributedLoss


def wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Name of the child that `module` hands its calls to, and the child; None if `module` wraps nothing.

    Wrappers are `DistributedDataParallel`, `DataParallel`, `torch.compile`'s, `DistributedLoss` and PML's
    `DistributedLossWrapper`.
    """
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        name = "module"
    elif isinstance(module, (DistributedLoss, DistributedLossWrapper)):
        name = "loss"
    else:
        name = "_orig_mod"  # of torch.compile's OptimizedModule, whose import takes seconds
    child = module._modules.get(name)
    return None if child is None else (name, child)


def joined(*names: str) -> str:
    """A dotted path without the empty names."""
    return ".".join(filter(None, names))
