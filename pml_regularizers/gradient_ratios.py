r"""Strength of a regularizer: its gradient, relative to the base loss's.

    ratio_r(place) = | d (w_r R_r) / d place | / | d (w_b L_b) / d place |

A weight alone says little: the scale of losses differs by orders of magnitude, depending on their reduction, the
size of the batch and the size of the embeddings. The ratio shows the effect on the network. It is linear in the
weight, so that one measurement gives the weight for any wanted ratio: w * wanted / measured.
"""

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.reducers import MultipleReducers
from torch import Tensor, nn

from ._unwrapping import joined, wrapped
from .distributed import world_size
from .features.feature_loss import FeatureLoss

_Weights = tuple[tuple[Any, Any], ...]  # (MultipleLosses, key) from the outermost inwards


@contextmanager
def capture_loss_terms(loss: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the weighted terms of `loss` that its calls inside a `with` block add up.

    These are the terms of `MultipleLosses`, by name. A loss of this library that is a sum
    itself, such as `HORDELoss`, gives its own terms: "horde.order_1" is the base loss. The loss may be wrapped
    for several processes. Call it as always, once per forward pass; calls in other threads do not count.

    Args:
        loss: `MultipleLosses`, or another loss that is a sum; wrapped or not.

    Returns:
        Scalars by name, filled by the call. Their sum is the value that the call returned.

    Raises:
        ValueError: if `loss` is no sum, or was not called inside the block.

    Example:
        >>> from pytorch_metric_learning import losses
        >>> loss = losses.MultipleLosses(
        ...     {"metric": losses.TripletMarginLoss(), "pairs": losses.ContrastiveLoss()},
        ...     weights={"metric": 1, "pairs": 0.5},
        ... )
        >>> with capture_loss_terms(loss) as terms:
        ...     total = loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        >>> list(terms), bool(total == sum(terms.values()))
        (['metric', 'pairs'], True)
    """
    terms: dict[str, Tensor] = {}
    places: dict[nn.Module, list[tuple[str, _Weights]]] = {}
    for part, name, weights in _parts(loss):
        places.setdefault(part, []).append((name, weights))
    names = [name for named in places.values() for name, _ in named]
    if names == [""]:
        raise ValueError(
            f"loss: expected a sum of losses, such as MultipleLosses, got {type(loss).__name__}; add the "
            'regularizer to it: MultipleLosses({"metric": loss, "regularizer": regularizer})'
        )
    here = _Thread()
    here.recording = True
    handles = [
        part.register_forward_hook(_recorder(terms, named, here)) for part, named in places.items()
    ]
    try:
        yield terms
    finally:
        for handle in handles:
            handle.remove()
    if missing := [name for name in names if name not in terms]:
        raise ValueError(
            f"loss: no call of {', '.join(missing)} was recorded; call the loss inside the with block (if "
            "torch.compile compiled it before, call torch._dynamo.reset() first)"
        )


def term_names(loss: nn.Module) -> list[str]:
    """Names of the terms that `capture_loss_terms` records; empty if the loss is no sum."""
    return [name for _, name, _ in _parts(loss) if name]


def _parts(
    module: nn.Module, path: str = "", weights: _Weights = ()
) -> Iterator[tuple[nn.Module, str, _Weights]]:
    """The modules whose outputs, times their weights, are the terms of a loss."""
    if (inside := wrapped(module)) is not None:
        yield from _parts(inside[1], path, weights)
    elif isinstance(module, MultipleLosses):
        for key, part in module.losses.items() if module.is_dict else enumerate(module.losses):
            yield from _parts(part, joined(path, str(key)), (*weights, (module, key)))
    elif isinstance(module, FeatureLoss) and isinstance(module.reducer, MultipleReducers):
        for name, reducer in module.reducer.reducers.items():
            yield reducer, joined(path, name), weights
    else:
        yield module, path, weights


class _Thread(threading.local):
    recording = False


def _recorder(terms: dict[str, Tensor], named: list[tuple[str, _Weights]], here: _Thread) -> Any:
    # A loss that stands in several places is called for them one after the other.
    turns = itertools.cycle(named)

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        if not here.recording:
            return
        name, weights = next(turns)
        term = output * math.prod(owner.weights[key] for owner, key in weights)
        terms[name] = terms[name] + term if name in terms else term

    return record


def gradient_norm_ratios(
    losses: Mapping[str, Tensor],
    *,
    base: str,
    at: Mapping[str, Tensor | Iterable[Tensor] | nn.Module],
) -> dict[str, dict[str, float]]:
    """Gradient norm of every weighted loss, divided by the base loss's, at several places.

    It takes one forward pass and one backward pass per loss. Every `.grad` stays as it is, and the graph can
    still be used for the step's own backward pass.

    With several processes, all must call this. It then measures the gradients that the optimizer will see:
    gradients of parameters are first averaged over the processes, as DistributedDataParallel does; other tensors,
    such as embeddings, count as rows of a larger batch. With `DistributedLoss` the ratios equal those of one
    process with the whole batch.

    Norms are computed in float64, from gradients in the precision of their tensors. Under float16 autocast, pass
    the losses as the gradient scaler scales them; the factor cancels.

    Args:
        losses: Weighted scalars by name, as `capture_loss_terms` gives them.
        base: Name of the loss to compare the others with.
        at: Tensors of the graph by name, one or several, such as `{"embeddings": embeddings, "trunk":
            trunk.parameters()}`; a module stands for its parameters. Those that require no gradient are left out.

    Returns:
        `{loss: {place: ratio}}`, without the base. 0 if a loss does not reach a place. If the base loss has no
        gradient there: inf, or nan if the other loss has none either.

    Raises:
        ValueError: if `base` is not one of the names, a loss is no scalar, or nothing at a place requires a
            gradient; in the first step of `DistributedDataParallel(static_graph=True)`.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> gradient_norm_ratios({"metric": x[0], "other": x.square().sum()}, base="metric", at={"x": x})
        {'other': {'x': 10.0}}
    """
    if base not in losses:
        raise ValueError(f"base: expected one of {', '.join(losses) or 'no losses'}, got {base!r}")
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"losses: expected {name} to be a scalar tensor, got {came}")
    if not isinstance(at, Mapping) or not at:
        raise ValueError(
            'at: expected a dict of places by name, such as {"trunk": trunk}, got '
            f"{'none' if isinstance(at, Mapping) else type(at).__name__}"
        )
    places = {name: _trained(name, tensors) for name, tensors in at.items()}
    if world_size() > 1:
        _check_static_graph(losses.values())
    norms = {name: _norms(loss, places) for name, loss in losses.items()}
    return {
        name: {place: (norm / norms[base][place]).item() for place, norm in found.items()}
        for name, found in norms.items()
        if name != base
    }


def _trained(name: str, tensors: Any) -> list[Tensor]:
    if isinstance(tensors, nn.Module):
        tensors = tensors.parameters()
    alone = isinstance(tensors, Tensor) or not isinstance(tensors, Iterable)
    listed = [tensors] if alone else list(tensors)
    for tensor in listed:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"at: expected tensors at {name}, got {type(tensor).__name__}; pass one, several, or a module"
            )
    trained = [tensor for tensor in listed if tensor.requires_grad]
    if not trained:
        raise ValueError(
            f"at: none of the {len(listed)} tensors of {name} requires a gradient; pass those that the losses were "
            "computed from, or trained parameters"
        )
    return trained


def _check_static_graph(losses: Iterable[Tensor]) -> None:
    """Raise a ValueError in the first step of `DistributedDataParallel(static_graph=True)`.

    DDP averages the gradients of that step when the first backward pass through its output ends. Our backward
    passes accumulate no gradients: if one of them came first, the processes would never agree again.
    """
    nodes: list[Any] = [loss.grad_fn for loss in losses]
    seen = {None}
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        # Private to torch: if a name is gone, nothing is refused.
        ddp = getattr(node, "ddp_weakref", lambda: None)()
        if getattr(ddp, "static_graph", False) and not getattr(
            ddp, "_static_graph_delay_allreduce_enqueued", True
        ):
            raise ValueError(
                "losses: got those of the first step of DistributedDataParallel(static_graph=True), where the "
                "first backward pass must be the step's own; measure from the second step on"
            )


def _norms(loss: Tensor, places: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Norm of the gradient of `loss` at each place: float64 scalars."""
    inputs = [tensor for tensors in places.values() for tensor in tensors]
    gradients = iter(
        torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        if loss.requires_grad
        else [None] * len(inputs)
    )
    return {
        place: _norm(tensors, list(itertools.islice(gradients, len(tensors))))
        for place, tensors in places.items()
    }


def _norm(tensors: list[Tensor], gradients: list[Tensor | None]) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    averaged, rows = zero, zero.clone()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(tensor)
        gradient = gradient.to(zero, copy=True).contiguous()
        if world_size() > 1 and isinstance(tensor, nn.Parameter):
            dist.all_reduce(gradient)  # a sum; dividing it would change no ratio
            averaged = averaged + gradient.square().sum()
        else:
            rows = rows + gradient.square().sum()
    if world_size() > 1:
        dist.all_reduce(rows)
    return (averaged + rows).sqrt()
