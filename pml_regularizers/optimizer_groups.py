"""Parameter groups of a network and its loss, and a check that an optimizer has every parameter.

Losses have parameters of their own (projections, proxies, class weights), and some modules need settings of their
own. The vector of `VEMAttention` estimates a variance. Adam moves it by about one learning rate per step: at a
trunk's rate of 1e-5 it would never arrive. Weight decay should not pull it to zero, either. Such a module states
its settings in a class attribute:

    class VEMAttention(nn.Module):
        optimizer_settings = {"lr": 1e-2, "weight_decay": 0.0}

PML's `MarginLoss` has no such attribute for its boundary beta, a distance that would hardly move at a trunk's
rate. Here beta gets its authors' rate (Wu et al., "Sampling Matters in Deep Embedding Learning"): 5e-4, without
decay.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytorch_metric_learning.losses import MarginLoss
from torch import Tensor, nn

from ._unwrapping import joined, wrapped

Settings = Mapping[str, Any]

_BETA: Settings = {"lr": 5e-4, "weight_decay": 0.0}


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

    There is a group "model", a group "loss", and one for each module that has an attribute `optimizer_settings`
    or is named in `overrides`. Its name is the module's path: "model.head.attention". The settings of a path hold
    for everything below it; a longer path overrides a shorter one, and at the same path `overrides` overrides
    `optimizer_settings`. Each parameter is in one group, a shared parameter in the group of its first place.
    Frozen parameters (`requires_grad=False`) are in no group.

    Paths leave out `DistributedDataParallel`, `DistributedLoss` and other wrappers, so that the same overrides
    fit one process and many.

    Args:
        model: The network. In a PML trainer with an optimizer per model, call this once for each.
        loss: The loss, whose own parameters are trained as well.
        lr: Learning rate of the network.
        loss_lr: Learning rate of the loss's own parameters. Default: `lr`, except for the trained beta of PML's
            `MarginLoss`, which has a group of its own: 5e-4 without weight decay.
        weight_decay: Weight decay of both. Default: the optimizer's.
        overrides: Settings by the path of a module or a parameter, from "model" or "loss" on, as in
            `{"model.head.fc": {"lr": 1e-4}, "loss.losses.proxies": {"weight_decay": 0}}`. Any settings are passed
            on; the optimizer silently ignores those that it does not know.

    Returns:
        Dicts with "name", "params", "lr" and all other settings; no group is empty.

    Raises:
        ValueError: if a path in `overrides` leads to no trained parameter or has no settings, or `model` or
            `loss` is no module.

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
    overrides = overrides or {}
    shared = {} if weight_decay is None else {"weight_decay": weight_decay}
    roots: dict[str, tuple[nn.Module | None, Settings]] = {
        "model": (model, {"lr": lr, **shared}),
        "loss": (loss, {"lr": lr if loss_lr is None else loss_lr, **shared}),
    }
    for path, own in overrides.items():
        if not isinstance(own, Mapping):
            raise ValueError(
                f'overrides: expected settings such as {{"lr": 1e-4}} for {path}, got {own!r}'
            )
    groups: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    used: set[str] = set()
    for root, (module, settings) in roots.items():
        if module is None:
            continue
        _check_module(module, root)
        for steps, parameter in _trained(module, root):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name, merged = root, dict(settings)
            if root == "loss" and loss_lr is not None:
                steps = [(path, {} if own is _BETA else own) for path, own in steps]
            for path, own in steps:
                if own or path in overrides:
                    name = path
                    merged.update({**own, **overrides.get(path, {})})
                    used.add(path)
            group = groups.setdefault(name, {"name": name, "params": [], **merged})
            group["params"].append(parameter)
    if unused := sorted(overrides.keys() - used):
        raise ValueError(
            f"overrides: no trained parameter is at {', '.join(unused)}; a path leads from 'model' or 'loss' to a "
            f"module or a parameter, as in {', '.join(groups) or 'model'}"
        )
    return list(groups.values())


def check_optimized(loss: nn.Module, *optimizers: Any) -> list[str]:
    """Warn of parameters that no optimizer has; PML would silently leave them untrained.

    Args:
        loss: Any loss, wrapped or not; a network works as well. Frozen parameters do not count.
        *optimizers: All optimizers that take steps, Accelerate's included, as in
            `check_optimized(loss, *trainer.optimizers.values())`.

    Returns:
        The names of the parameters that are not trained.

    Raises:
        ValueError: if an optimizer has no `param_groups`, or `loss` is no module.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> check_optimized(loss := losses.ArcFaceLoss(3, 4), torch.optim.Adam(loss.parameters()))
        []
    """
    _check_module(loss, "loss")
    trained = set()
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(
                f"optimizers: expected torch optimizers, got {type(optimizer).__name__}; unpack a dict of them, as "
                "in check_optimized(loss, *optimizers.values())"
            )
        trained |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {
        id(parameter): steps[-1][0]
        for steps, parameter in _trained(loss, "")
        if id(parameter) not in trained
    }
    untrained = list(names.values())
    if untrained:
        warnings.warn(
            f"no optimizer got {len(untrained)} of {type(loss).__name__}'s parameters, which will stay as they "
            f"are: {', '.join(untrained)}. Make one of parameter_groups(model, loss, lr=...), after wrapping and "
            'copying; in a PML trainer, pass optimizers={"metric_loss_optimizer": ...}',
            stacklevel=2,
        )
    return untrained


def _check_module(module: Any, name: str) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{name}: expected a module, got {type(module).__name__}; pass the module itself, not its parameters, "
            "and several of them one by one or as nn.ModuleDict(...)"
        )


def _trained(
    module: nn.Module, path: str, above: Iterable[tuple[str, Settings]] = ()
) -> Iterator[tuple[list[tuple[str, Settings]], nn.Parameter]]:
    """Trained parameters, each with the (path, own settings) of every module around it and of itself."""
    steps = [*above, (path, getattr(module, "optimizer_settings", {}))]
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            own = _BETA if isinstance(module, MarginLoss) and name == "beta" else {}
            yield [*steps, (joined(path, name), own)], parameter
    inside, _ = wrapped(module) or (None, None)
    for name, child in module.named_children():
        yield from _trained(child, path if name == inside else joined(path, name), steps)
