"""A batch that passes a network in chunks, twice, and the comparison that tells whether chunks are the batch."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .features.feature_loss import FeatureLoss
from .features.feature_tap import FeatureTap, MissingFeaturesError, recording_in_backward
from .functional.checks import came

_SAME = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Difference that rounding may cause, relative to the largest entry; in half precision `_SAME_IN_HALF`."""
_SAME_IN_HALF = 0.05

_FREEZE = "freeze it (its eval() after each model.train()), or take a network without it"
_FROM_TORCH = "draw random numbers from torch, and change nothing that the next pass depends on"


class ChunkedBatch:
    """The images of a call of a `GradientCache`, by `args` and `kwargs`, and what their second pass needs."""

    def __init__(
        self, model: nn.Module, loss: nn.Module, chunk_size: int, args: Any, kwargs: Any
    ) -> None:
        self.model, self.chunk_size = model, chunk_size
        parts = [part for part in loss.modules() if isinstance(part, FeatureLoss)]
        self.taps = [part.tap for part in parts if part.tap is not None]
        self.given, self.structure = tree_flatten((args, kwargs))
        self.places = [i for i, x in enumerate(self.given) if isinstance(x, Tensor) and x.ndim]
        self.tensors: list[Tensor] = [self.given[i] for i in self.places]
        if hidden := [x for x in self.given if _holds_tensors(x)]:
            raise ValueError(
                f"GradientCache: cannot split the tensors in a {type(hidden[0]).__name__}; pass them by name, "
                "cache(**batch), or in a dict, list or tuple"
            )
        if len({len(x) for x in self.tensors}) != 1:
            raise ValueError(
                "GradientCache: expected tensors with a row for each image, got "
                f"{', '.join(map(came, self.tensors)) or 'none'}; expand those that serve all images"
            )
        self.size = len(self.tensors[0])
        for x in tree_leaves([*args, *kwargs.values()], is_leaf=_is_sequence):
            if _is_sequence(x) and len(x) == self.size > 1:
                raise ValueError(
                    f"GradientCache: cannot split a {type(x).__name__} of {self.size} entries, as many as images; "
                    "pass a tensor, such as token numbers, or keep it in the network if it serves all images"
                )
        for i in self.places:
            self.given[i] = None
        self.linked = [x for x in self.model.parameters() if _is_linked(x)]
        starts = range(0, max(self.size, 1), chunk_size)
        self.chunks = [slice(start, start + chunk_size) for start in starts]
        self.checked = False
        """True if the comparison was made, and the images differed, such that it could show a fault."""
        self.outputs: list[Tensor] = []
        self.form: Any = None  # of what the network returns: its structure, and what is no tensor
        used = {x.device for x in (*self.tensors, *self.model.parameters())}
        self.devices = [device for device in used if device.type not in ("cpu", "meta")]
        self.states: list[list[Tensor]] = []  # of the generators, before each chunk
        # Without autocast's cache: its copies of the weights, made here, would have no gradient in the second pass.
        self.autocasts = [
            partial(
                torch.autocast,
                kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
                cache_enabled=False,
            )
            for kind in {"cpu", *(device.type for device in self.devices)}
        ]

    @property
    def trains(self) -> bool:
        """True if a pass over the whole batch would have a graph."""
        trained = any(x.requires_grad for x in (*self.model.parameters(), *self.tensors))
        return trained and torch.is_grad_enabled()

    def embed(self, *, check: bool) -> None:
        """The first pass, whose joined tensors are `outputs`; `check`: refuse a network that mixes images."""
        before, steady = _buffers(self.model) if check else {}, None
        passes: list[list[Tensor]] = []
        with torch.no_grad():
            for rows in self.chunks:
                self.states.append(_generators(self.devices))
                passes.append(self._pass([x[rows].clone() for x in self.tensors]))
                if check and steady is None:  # not before: the first pass may fill caches
                    steady = _buffers(self.model)
            self.outputs = [torch.cat(parts) for parts in zip(*passes, strict=True)]
            if steady is not None:
                self._check(before, steady)
        own = [i for i, x in enumerate(self.outputs[: self.own]) if _is_float(x)]
        self.shown = min(own, key=lambda i: self.outputs[i].numel())
        self.embeddings = self.outputs[self.shown].detach().clone()
        self.before = modes_of(self.model), _weights(self.model)

    def tree(self, outputs: Sequence[Any]) -> list[Any]:
        """What the network returns, then the features of each tap."""
        left, (spec, leaves) = iter(outputs), self.form
        tree: list[Any] = tree_unflatten([next(left) if x is ... else x for x in leaves], spec)
        return tree

    def backward(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        *,
        accumulate: bool,
        compare: bool,
    ) -> list[Tensor | None]:
        """The second pass: from the gradients of the outputs to those of the tensors of the call, which it returns.

        Args:
            accumulate: Add the gradients of the parameters to theirs; else, return them after those of the tensors.
            compare: Refuse other embeddings than those of the first pass.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "GradientCache: expected a backward pass without create_graph=True, got one with it; call the "
                "network itself where gradients are differentiated"
            )
        if self.before != (modes_of(self.model), _weights(self.model)):
            raise RuntimeError(
                "model: its weights, or which of its modules train, have changed since the call of GradientCache; "
                "change them after the loss's backward pass"
            )
        if not accumulate and len(self.linked) < sum(
            x.requires_grad for x in self.model.parameters()
        ):
            raise RuntimeError(
                "GradientCache: expected backward() without inputs=, and no autograd.grad, where parameters have "
                "hooks or are sharded; call the network itself for gradients of chosen tensors"
            )
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        inputs = [x for x in (*leaves, *self.linked) if x.requires_grad]
        totals: dict[Tensor, Tensor] = {}
        state, reached = _generators(self.devices), False
        try:
            for rows, own_state in zip(self.chunks, self.states, strict=True):
                # DistributedDataParallel averages what all chunks have added up.
                last = rows == self.chunks[-1]
                averaging = nullcontext() if last else getattr(self.model, "no_sync", nullcontext)()
                _set_generators(self.devices, own_state)
                with averaging, torch.enable_grad(), recording_in_backward():
                    outputs = self._pass([x[rows].clone() for x in leaves])
                    if compare and self._differs(
                        outputs[self.shown].detach(), self.embeddings[rows]
                    ):
                        raise RuntimeError(
                            "model: the second pass over a chunk gave other embeddings than the first, so its "
                            f"gradients would be wrong; {_FROM_TORCH}"
                        )
                    traced = [
                        (output, gradient[rows])
                        for output, gradient in zip(outputs, gradients, strict=True)
                        if gradient is not None and output.requires_grad
                    ]
                    ends, above = [x for x, _ in traced], [x for _, x in traced]
                    if accumulate and traced:
                        torch.autograd.backward(ends, above)
                        reached = True
                    elif traced:
                        own = torch.autograd.grad(ends, inputs, above, allow_unused=True)
                        for x, gradient in zip(inputs, own, strict=True):
                            if gradient is not None:
                                totals[x] = totals[x] + gradient if x in totals else gradient
                                reached = True
        finally:
            _set_generators(self.devices, state)
        if not reached:
            raise RuntimeError(
                "model: nothing that the loss reads has a gradient in the second pass; is it detached? Leave out "
                "detach() and no_grad"
            )
        return [x.grad if accumulate else totals.get(x) for x in leaves] + [
            totals.get(x) for x in self.linked
        ]

    def _pass(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the network returns for some images, and the features of each tap."""
        # On a CPU, torch's batch norm has wrong gradients for one image whose stride, which counts for nothing, is
        # neither that of channels first nor last, as behind `x.flatten(2).transpose(1, 2).mean(dim=1)`.
        alone = len(tensors[0]) == 1 < self.size and not self.devices
        if alone:
            tensors = [torch.cat([x, x]) for x in tensors]
        given = list(self.given)
        for place, x in zip(self.places, tensors, strict=True):
            given[place] = x
        args, kwargs = tree_unflatten(given, self.structure)
        with ExitStack() as stack:
            for autocast in self.autocasts:
                stack.enter_context(autocast())
            result = self.model(*args, **kwargs)
        own = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.own = len(own)
        embeddings = [x for x in own if _is_float(x)]
        if not embeddings:
            raise ValueError(
                f"model: expected a network that returns embeddings (N, E), got {type(result).__name__}; "
                "return them, alone or in a dict"
            )
        features = [_taken(tap, embeddings) for tap in self.taps]
        leaves, spec = tree_flatten([result, *features])
        for x in leaves:
            plain = isinstance(x, bool | int | float | str | None)
            if not (x.shape[:1] == tensors[0].shape[:1] if isinstance(x, Tensor) else plain):
                raise ValueError(
                    f"model: expected outputs with a row for each of the {len(tensors[0])} images of a pass, got "
                    f"{came(x)}; return the embeddings alone"
                )
        self.form = spec, [... if isinstance(x, Tensor) else x for x in leaves]
        return [x[:1] if alone else x for x in leaves if isinstance(x, Tensor)]

    def _differs(self, x: Tensor, y: Tensor) -> bool:
        """True if they differ by more than rounding in the least precise numbers that the network may use."""
        dtypes = {z.dtype for z in (x, *self.model.parameters()) if _is_float(z)}
        dtypes |= {cast.keywords["dtype"] for cast in self.autocasts if cast.keywords["enabled"]}
        limit = max(_SAME.get(dtype, _SAME_IN_HALF) for dtype in dtypes)
        return x.numel() > 0 and bool((x - y).abs().max() > limit * y.abs().max())

    def _check(self, before: Mapping[str, Tensor], steady: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if the outputs for an image depend on the other images, or on earlier passes.

        The buffers were `before` when the first chunk came, and `steady` after it.
        """
        state = _generators(self.devices)
        try:
            self._compare()
            for name, buffer in _buffers(self.model).items():
                if name in steady and not _same(buffer, steady[name]):
                    raise ValueError(
                        f"model: each pass changes {name}, and chunks pass twice; {_FREEZE}"
                    )
            if not self._steady:
                raise ValueError(f"model: two passes over the same images differ; {_FROM_TORCH}")
        except Exception:
            for name, buffer in self.model.named_buffers():
                if name in before and before[name].shape == buffer.shape:
                    buffer.copy_(before[name])
            raise
        finally:
            _set_generators(self.devices, state)

    def _compare(self) -> None:
        """Pass images of the batch, as many as in a chunk, again with some of them replaced by another one."""
        places = torch.arange(max(2, min(self.chunk_size, self.size)))
        images = places * self.size // len(places)
        expected = self._embedded(images)
        self._steady = not any(map(self._differs, self._embedded(images), expected))
        differed = []
        for half in (places < (len(places) + 1) // 2, places % 2 == 0) if self._steady else ():
            for kept in (half, ~half):
                others = torch.where(kept, images, images[kept][0])
                pairs = [*zip(self._embedded(others), expected, strict=True)]
                if any(self._differs(x[kept], y[kept]) for x, y in pairs):
                    raise ValueError(
                        f"model: {self._first_to_mix(images, others, kept)} mixes the images of a pass, so that a "
                        f"chunk is not the batch; {_FREEZE}"
                    )
                differed.append(any(self._differs(x[~kept], y[~kept]) for x, y in pairs))
        self.checked = all(differed)

    def _embedded(self, images: Tensor) -> list[Tensor]:
        """The outputs for these images, as with the random numbers of the first chunk."""
        _set_generators(self.devices, self.states[0])
        return [x for x in self._pass([x[images] for x in self.tensors]) if _is_float(x)]

    def _first_to_mix(self, images: Tensor, others: Tensor, kept: Tensor) -> str:
        """The first layer whose outputs for the images that are kept differ."""
        seen: list[list[tuple[str, Tensor]]] = [[], []]
        for passed, outputs in zip((images, others), seen, strict=True):

            def keep(name: str, module: nn.Module, args: Any, x: Any) -> None:
                if _is_float(x) and len(x) == len(kept):
                    outputs.append((name, x[kept]))  # noqa: B023

            layers = [(n, m) for n, m in self.model.named_modules() if not [*m.children()]]
            hooks = [m.register_forward_hook(partial(keep, n)) for n, m in layers]
            self._embedded(passed)
            for hook in hooks:
                hook.remove()
        for (name, x), (_, y) in zip(*seen, strict=False):
            if x.shape == y.shape and self._differs(x, y):
                layer = type(self.model.get_submodule(name)).__name__
                return f"{name}, {layer}," if name else layer
        return type(self.model).__name__


def modes_of(model: nn.Module) -> tuple[Any, ...]:
    """The modules of a network, and which of them are in training mode."""
    return tuple((id(module), module.training) for module in model.modules())


def _weights(model: nn.Module) -> list[tuple[int, int, bool]]:
    """What tells whether a parameter was replaced, changed or frozen."""
    parameters = model.parameters()
    return [(id(p), 0 if p.is_inference() else p._version, p.requires_grad) for p in parameters]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _same(x: Tensor, y: Tensor) -> bool:
    """True for equal buffers, NaN included; and for those of other shapes, as caches that have grown."""
    return x.shape != y.shape or bool(((x == y) | (x.isnan() & y.isnan())).all())


def _generators(devices: Iterable[torch.device]) -> list[Tensor]:
    """The states of torch's random generators: the CPU's, and those of devices."""
    states = [torch.get_rng_state()]
    for device in devices:
        get = torch.get_device_module(device).get_rng_state
        states.append(get() if device.type == "mps" else get(device))  # there is but one
    return states


def _set_generators(devices: Iterable[torch.device], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        put = torch.get_device_module(device).set_rng_state
        put(state) if device.type == "mps" else put(state, device)


def _is_linked(x: nn.Parameter) -> bool:
    """True if the loss's graph shall lead to a parameter, so that its gradient alone can be asked for.

    Without that, the second pass adds it to `.grad`, and autograd brings nothing: a hook would take that for a
    gradient.
    """
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    sharded = type(x) is not nn.Parameter  # by FullyShardedDataParallel
    return x.requires_grad and not sharded and not any(getattr(x, name, None) for name in hooks)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0


def _holds_tensors(x: Any) -> bool:
    """True for an object with tensors that a tree of dicts, lists and tuples does not show."""
    if isinstance(x, Tensor | nn.Module):
        return False
    values = [*(x.values() if isinstance(x, Mapping) else getattr(x, "__dict__", {}).values())]
    values += [getattr(x, name, None) for name in getattr(x, "__slots__", ())]
    return any(isinstance(value, Tensor) for value in values)


def _is_sequence(x: Any) -> bool:
    """True for a list, tuple or array without tensors, which may have an entry for each image."""
    if isinstance(x, list | tuple):
        return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))
    return not isinstance(x, Tensor) and bool(getattr(x, "shape", ()))


def _taken(tap: FeatureTap, embeddings: Sequence[Tensor]) -> Any:
    """The features of a pass that has returned several tensors, one of which the tap knows."""
    for x in embeddings[:-1]:
        try:
            return tap.take(x)
        except MissingFeaturesError:
            continue
    return tap.take(embeddings[-1])
