"""Parameter groups of a network and its loss.

Losses have parameters of their own (projections, proxies, class weights). A module that needs settings of its own
states them in a class attribute, as `VEMAttention` does: `optimizer_settings = {"lr": 1e-2, "weight_decay": 0.0}`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from .distributed import DistributedLoss
from .functional.checks import check_module

Settings = Mapping[str, Any]


def parameter_groups(
    model: nn.Module,
    loss: nn.Module | None = None,
    *,
    lr: float | Tensor,
    loss_lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    overrides: Mapping[str, Settings] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups of a network and its loss, for any torch optimizer.

    There is a group "model", a group "loss", and one for each module that has `optimizer_settings` or is named in
    `overrides`. Its name is the module's path, such as "model.head.attention", without wrappers such as
    `DistributedDataParallel`. Settings hold for everything below their path; a longer path overrides a shorter one,
    and `overrides` a module's `optimizer_settings`. A shared parameter is in the group of its first place, a frozen
    one in none.

    Args:
        model: The network. In a PML trainer with an optimizer per model, call this once for each.
        loss: The loss, whose own parameters are trained as well.
        lr, loss_lr: Learning rates of the network and of the loss's own parameters; default of the latter: `lr`.
        weight_decay: Weight decay of both. Default: the optimizer's.
        overrides: Settings by the path of a module or a parameter, as in `{"model.head.fc": {"lr": 1e-4},
            "loss.beta": {"weight_decay": 0}}`. The optimizer silently ignores those that it does not know.

    Returns:
        Dicts with "name", "params", "lr" and all other settings; no group is empty.

    Raises:
        ValueError: if a path in `overrides` leads to no trained parameter, or has no settings.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        >>> groups = parameter_groups(
        ...     model, losses.ArcFaceLoss(3, 4), lr=1e-5, loss_lr=1e-2, overrides={"model.1": {"lr": 1e-4}}
        ... )
        >>> [(group["name"], group["lr"], len(group["params"])) for group in groups]
        [('model', 1e-05, 2), ('model.1', 0.0001, 2), ('loss', 0.01, 1)]
        >>> optimizer = torch.optim.Adam(groups)
    """
    check_module("model", model)
    overrides = overrides or {}
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: dict[str, dict[str, Any]] = {}
    paths: dict[nn.Parameter, str] = {}
    roots = {"model": (model, lr), "loss": (loss, lr if loss_lr is None else loss_lr)}
    for root, (module, rate) in roots.items():
        if module is None:
            continue
        outermost = {"name": root, "lr": rate, **decay}
        for path, parameter, settings in _trained(module, root, outermost, overrides):
            if parameter not in paths:
                paths[parameter] = path
                group = groups.setdefault(settings["name"], {**settings, "params": []})
                group["params"].append(parameter)
    unused = [
        path
        for path, settings in sorted(overrides.items())
        if not settings or not any(f"{place}.".startswith(f"{path}.") for place in paths.values())
    ]
    if unused:
        raise ValueError(
            f"overrides: no trained parameter is at {', '.join(unused)}; a path leads from 'model' or 'loss' to a "
            f"module or a parameter, as in {', '.join(groups) or 'model'}"
        )
    return list(groups.values())


def _trained(
    module: nn.Module, path: str, group: dict[str, Any], overrides: Mapping[str, Settings]
) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Path, parameter and settings of every trained parameter, inside a module of that group."""

    def inner(path: str, settings: Settings) -> dict[str, Any]:
        settings = {**settings, **overrides.get(path, {})}
        return {**group, **settings, "name": path} if settings else group

    group = inner(path, getattr(module, "optimizer_settings", {}))
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            yield (place := joined(path, name)), parameter, inner(place, {})
    inside, _ = wrapped(module) or (None, None)
    for name, child in module.named_children():
        yield from _trained(child, path if name == inside else joined(path, name), group, overrides)


def wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Name of the child that a wrapper, such as DDP, hands its calls to, and the child; None for other modules."""
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
