r"""Strength of a regularizer: its gradient, relative to the base loss's.

    ratio_r(place) = | d (w_r R_r) / d place | / | d (w_b L_b) / d place |

A weight alone says little, since the scale of a loss depends on its reduction, the batch and the embeddings. The
ratio shows the effect on the network. It is linear in the weight: w * wanted / measured gives the wanted ratio.
"""

import itertools
import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.reducers import MultipleReducers
from torch import Tensor, nn

from .distributed import world_size
from .features.feature_loss import FeatureLoss
from .functional.precision import in_float64
from .optimizer_groups import joined, wrapped

_Weights = tuple[tuple[Any, Any], ...]  # (MultipleLosses, key) from the outermost inwards


@contextmanager
def capture_loss_terms(loss: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the weighted terms that `loss` adds up when it is called inside a `with` block.

    Args:
        loss: `MultipleLosses`, or a loss of this library that is a sum itself, such as `HORDELoss`: "horde.order_1"
            is its base loss. Wrapped for several processes or not.

    Returns:
        Scalars by name, filled by the call (in this thread). Their sum is the value that the call returned.

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
    names = term_names(loss)
    if not names:
        raise ValueError(
            f"loss: expected a sum of losses, such as MultipleLosses, got {type(loss).__name__}; add the "
            'regularizer to it: MultipleLosses({"metric": loss, "regularizer": regularizer})'
        )
    turns: dict[nn.Module, deque[tuple[str, _Weights]]] = defaultdict(deque)
    for part, name, weights in _parts(loss):
        turns[part].append((name, weights))
    terms: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def record(part: nn.Module, args: Any, output: Tensor) -> None:
        if threading.get_ident() == thread:
            name, weights = turns[part][0]
            turns[part].rotate(-1)  # one loss in several places is called for them in turn
            term = output * math.prod(owner.weights[key] for owner, key in weights)
            terms[name] = terms[name] + term if name in terms else term

    handles = [part.register_forward_hook(record) for part in turns]
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
        reducers = dict(module.reducer.reducers.items())
        for name in module.sub_loss_names():
            yield reducers.get(name, module.reducer.default_reducer), joined(path, name), weights
    else:
        yield module, path, weights


def gradient_norm_ratios(
    losses: Mapping[str, Tensor],
    *,
    base: str,
    at: Mapping[str, Tensor | Iterable[Tensor] | nn.Module],
) -> dict[str, dict[str, float]]:
    """Gradient norm of every weighted loss, divided by the base loss's, at several places.

    It takes one backward pass per loss. Every `.grad` stays as it is, and the graph can still be used for the
    step's own backward pass. With several processes, all must call this. Gradients of parameters are averaged over
    them first, as DistributedDataParallel does; other tensors, such as embeddings, count as rows of a larger batch.
    With `DistributedLoss` the ratios equal those of one process with the whole batch. Under
    `DistributedDataParallel(static_graph=True)`, whose first backward pass must be the step's own, call it from the
    second step on.

    Args:
        losses: Weighted scalars by name, as `capture_loss_terms` gives them. Under float16 autocast, pass them as
            the gradient scaler scales them; the factor cancels.
        base: Name of the loss to compare the others with.
        at: Tensors of the graph by name, one or several; a module stands for its parameters. Those that require
            no gradient are left out.

    Returns:
        `{loss: {place: ratio}}`, without the base. If the base loss has no gradient there: inf, or nan if the other
        loss has none either.

    Raises:
        ValueError: if `base` is not one of the names, or nothing at a place requires a gradient.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> gradient_norm_ratios({"metric": x[0], "other": x.square().sum()}, base="metric", at={"x": x})
        {'other': {'x': 10.0}}
    """
    if base not in losses:
        raise ValueError(f"base: expected one of {', '.join(losses) or 'no losses'}, got {base!r}")
    places = {name: _trained(name, tensors) for name, tensors in at.items()}
    tensors = list(dict.fromkeys(itertools.chain.from_iterable(places.values())))
    norms: dict[str, dict[str, Tensor]] = {}
    for name, loss in losses.items():
        gradients: Iterable[Tensor] = map(torch.zeros_like, tensors)
        if loss.requires_grad:
            gradients = torch.autograd.grad(
                loss, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        squares = dict(zip(tensors, map(_square, tensors, gradients), strict=True))
        norms[name] = {
            place: torch.stack([squares[tensor] for tensor in inside]).sum().sqrt()
            for place, inside in places.items()
        }
    return {
        name: {place: (norm / norms[base][place]).item() for place, norm in own.items()}
        for name, own in norms.items()
        if name != base
    }


def _trained(name: str, place: Tensor | Iterable[Tensor] | nn.Module) -> list[Tensor]:
    tensors = place.parameters() if isinstance(place, nn.Module) else place
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    trained = [tensor for tensor in listed if tensor.requires_grad]
    if not trained:
        raise ValueError(
            f"at: none of the {len(listed)} tensors of {name} requires a gradient; pass those that the losses were "
            "computed from, or trained parameters"
        )
    return trained


def _square(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Square of a gradient's norm over all processes, in float64."""
    gradient = in_float64(gradient).contiguous()
    averaged = isinstance(tensor, nn.Parameter)
    if world_size() > 1 and averaged:
        gradient = gradient.clone()
        dist.all_reduce(gradient)  # a sum; dividing it would change no ratio
    square = gradient.square().sum()
    if world_size() > 1 and not averaged:
        dist.all_reduce(square)
    return square
