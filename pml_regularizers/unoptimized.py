"""A warning for a loss's own parameters that no optimizer holds.

After each step of any optimizer, torch tells a hook which parameters that one holds. In doubt are those that had a
gradient while the optimizers of a training step went without them. After two such steps a warning names them, once:
unless they moved, as they do where an optimizer holds copies, or an optimizer holds them that steps less often.
Accumulated gradients, and steps that a GradScaler skips, are no steps of an optimizer.
"""

import gc
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary


class _Watch:
    """The parameters of a loss that are in doubt, and those of them that a training step left out."""

    def __init__(self, loss: nn.Module) -> None:
        self.doubted = {name: x for name, x in loss.named_parameters() if x.requires_grad}
        self.left_out: set[str] = set()
        self.before: dict[str, Tensor] = {}


_watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()
# A loss may be watched by itself and in a sum. Not by id: a later parameter may get that of one that is gone.
_told: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_hook: list[Any] = []


def watch(loss: nn.Module, embeddings: Any) -> None:
    """Look at a loss's own parameters, at the start of a training step."""
    training = loss.training and torch.is_grad_enabled()
    if not training or torch.compiler.is_compiling() or not getattr(embeddings, "requires_grad", 0):
        return
    watched = _watches.get(loss)
    if watched is None:
        watched = _watches[loss] = _Watch(loss)
        if watched.doubted and not _hook:
            _hook.append(register_optimizer_step_post_hook(_stepped))
    left_out = {name: x for name, x in watched.doubted.items() if name in watched.left_out}
    watched.left_out.clear()
    if not left_out:
        return
    if not watched.before:
        watched.before = {name: x.detach().clone() for name, x in left_out.items()}
        return
    still = [
        name
        for name, x in left_out.items()
        if x not in _told
        and name in watched.before
        and torch.equal(x, watched.before[name].to(x.device, x.dtype))
    ]
    watched.before, watched.doubted = {}, {}
    held: set[int] = set()
    for optimizer in gc.get_objects() if still else ():
        if issubclass(type(optimizer), Optimizer):
            held |= _held(optimizer)
    if still := [name for name in still if id(left_out[name]) not in held]:
        _told.update({left_out[name]: True for name in still})
        warnings.warn(
            f"{type(loss).__name__}: {', '.join(still)} had gradients in two steps and did not move, since no "
            "optimizer holds them; give loss.parameters() to one, after wrapping and copying, as by "
            'parameter_groups(model, loss, lr=...) or a PML trainer\'s "metric_loss_optimizer", or freeze them by '
            "requires_grad_(False)",
            stacklevel=2,
        )


def _held(optimizer: Optimizer) -> set[int]:
    return {id(x) for group in optimizer.param_groups for x in group["params"]}


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hook of all optimizers: what one holds is in doubt no more."""
    watches = [watched for watched in list(_watches.values()) if watched.doubted]
    if not watches:  # until the next loss
        while _hook:
            _hook.pop().remove()
        return
    held = _held(optimizer)
    for watched in watches:
        watched.doubted = {name: x for name, x in watched.doubted.items() if id(x) not in held}
        watched.left_out |= {name for name, x in watched.doubted.items() if x.grad is not None}
