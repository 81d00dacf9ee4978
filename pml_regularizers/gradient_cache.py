"""Gradient caching: the gradients of a large batch, with the memory of a small one.

Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (RepL4NLP 2021).

A metric loss compares the images of a batch; what the network computes for one image does not depend on the others:

1. The network embeds the batch in chunks, without a graph.
2. The loss of the whole batch gives its gradient at the embeddings.
3. Each chunk passes the network again, with a graph, which takes that gradient back to the parameters.

The paper caches the gradient at the embeddings; here also that at the features that the loss reads.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .features.feature_loss import FeatureLoss
from .features.feature_tap import FeatureTap
from .functional.checks import at_least

_SPECTRAL = (_SpectralNorm, SpectralNorm)
_SAME = 0.05
"""Difference between two passes that rounding may cause, even in bfloat16, relative to the largest entry."""


class GradientCache:
    """A network that embeds a batch in chunks; the gradients are those of one pass over the whole batch.

    Call it in place of the network, and `backward()` after the loss's own backward pass. Losses that read features
    find them as after one pass, if they are attached to a head, or with `embedder=`. Miners, `MultipleLosses`,
    `CrossBatchMemory` and gradient scalers work as without it.

    The network runs forward twice. Memory is that of a chunk's activations, and of the batch's embeddings and
    features that the loss reads, with their gradients. Dropout and other random numbers of torch are the same in
    both passes of a chunk. Under DistributedDataParallel the gradients are averaged once, with the last chunk.

    Args:
        model: The network: images (N, ...) -> embeddings (N, E). Batch norm and spectral norm must
            be frozen (`eval()`).
        loss: The loss, or a wrapper of it, whose parts that read features are attached to the network.
        chunk_size: Images in a pass of each process; the last chunk may be smaller.

    Raises:
        ValueError: for chunk_size < 1; in the call, for batch norm or spectral norm in training mode, or if the
            network does not return one tensor.
        MissingFeaturesError: in the call, if the features of a chunk are not known to be those of its embeddings.
        RuntimeError: in `backward`, if the loss's backward pass has not been made, or has read the embeddings of
            two calls; the first time, if the passes over a chunk differ, as with random numbers that are not
            torch's.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> from pml_regularizers import EmbeddingHead, HORDELoss
        >>> head = EmbeddingHead(32, 8)
        >>> model = nn.Sequential(nn.Conv2d(3, 32, 3), head)
        >>> loss = HORDELoss(losses.ContrastiveLoss(), 32, 8).attach(head)
        >>> cache = GradientCache(model, loss, chunk_size=2)
        >>> embeddings = cache(torch.randn(6, 3, 9, 9))  # not model(...)
        >>> loss(embeddings, torch.arange(6) // 2).backward()
        >>> cache.backward()
        >>> head.fc.weight.grad.shape
        torch.Size([8, 32])
    """

    def __init__(self, model: nn.Module, loss: nn.Module, chunk_size: int) -> None:
        at_least("chunk_size", chunk_size, 1)
        if not isinstance(chunk_size, int):
            raise ValueError(f"chunk_size: expected a whole number, got {chunk_size!r}")
        self.model = model
        self.loss = loss
        self.chunk_size = chunk_size
        self._chunks: list[tuple[Tensor, Tensor, Tensor | None]] = []  # with states of generators
        self._leaves: list[Tensor] = []  # the embeddings, then the features
        # Embeddings of calls without a backward pass.
        self._earlier: list[ReferenceType[Tensor]] = []
        self._compared = False

    def __call__(self, images: Tensor) -> Tensor:
        """Embed the batch, and give the losses its features: leaves of the graph, where their gradients gather."""
        _refuse_changing_norms(self.model)
        # Weights that it keeps from the first pass would have no gradient in the second.
        if parametrize._cache_enabled:
            raise ValueError(
                "GradientCache: called inside torch.nn.utils.parametrize.cached(), expected outside"
            )
        kind = images.device.type
        # Without autocast's cache: its copies of the weights, made here, would have no gradient in the second pass.
        self._autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )
        alive = [reference for reference in self._earlier if reference() is not None]
        self._earlier = [*alive, *(ref(leaf) for leaf in self._leaves[:1])]
        self._chunks, self._leaves = [], []
        passes: list[tuple[list[Tensor], TreeSpec]] = []
        for chunk in images.split(self.chunk_size):
            self._chunks.append((chunk, torch.get_rng_state(), _device_state(chunk.device)))
            with torch.no_grad():
                passes.append(self._outputs(chunk))
        outputs, structure = passes[0]
        # A tensor that several losses read is one leaf.
        self._places = [next(i for i, y in enumerate(outputs) if y is x) for x in outputs]
        leaves = [torch.cat(parts) for parts in zip(*(flat for flat, _ in passes), strict=True)]
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point() and torch.is_grad_enabled())
        self._leaves = [leaves[place] for place in self._places]
        embeddings, *features = tree_unflatten(self._leaves, structure)
        for tap, of_tap in zip(self._taps(), features, strict=True):
            tap.put(of_tap, embeddings)
        result: Tensor = embeddings
        return result

    def backward(self) -> None:
        """Add the gradients of the network's parameters, after the loss's backward pass."""
        earlier = [leaf for reference in self._earlier if (leaf := reference()) is not None]
        self._earlier = []
        if any(leaf.grad is not None for leaf in earlier):
            raise RuntimeError(
                "backward: the loss has read embeddings of an earlier call, whose chunks are gone; embed all "
                "images of a loss in one call: cache(torch.cat([first, second]))"
            )
        gradients = [leaf.grad for leaf in self._leaves]
        if all(gradient is None for gradient in gradients):
            raise RuntimeError(
                "backward: the embeddings have no gradient; call embeddings = cache(images), "
                "loss(embeddings, labels).backward() and cache.backward(), in this order and once for each batch"
            )
        chunks, embeddings = self._chunks, self._leaves[0].detach()
        self._chunks, self._leaves = [], []
        start, device = 0, chunks[0][0].device
        devices = [] if device.type == "cpu" else [device]
        with torch.enable_grad(), torch.random.fork_rng(devices, device_type=device.type):
            for number, (chunk, cpu_state, device_state) in enumerate(chunks, 1):
                rows = slice(start, start + len(chunk))
                start = rows.stop
                last = number == len(chunks)
                # DistributedDataParallel averages what all chunks have added up.
                with nullcontext() if last else getattr(self.model, "no_sync", nullcontext)():
                    torch.set_rng_state(cpu_state)
                    if device_state is not None:
                        torch.get_device_module(device).set_rng_state(device_state, device)
                    outputs, _ = self._outputs(chunk)
                    self._compare(outputs[0], embeddings[rows])
                    traced = [
                        (output, gradient[rows])
                        for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
                        if self._places[i] == i and output.requires_grad and gradient is not None
                    ]
                    if traced:
                        outputs, shares = map(list, zip(*traced, strict=True))
                        torch.autograd.backward(outputs, shares)

    def _taps(self) -> list[FeatureTap]:
        parts = (part for part in self.loss.modules() if isinstance(part, FeatureLoss))
        return [part.tap for part in parts if part.tap is not None]

    def _outputs(self, chunk: Tensor) -> tuple[list[Tensor], TreeSpec]:
        """The embeddings of a chunk, and the features of each tap, flattened."""
        with self._autocast():
            embeddings = self.model(chunk)
        if not isinstance(embeddings, Tensor):
            raise ValueError(
                f"model: expected a network that returns embeddings (N, E), got {type(embeddings).__name__}"
            )
        return tree_flatten([embeddings, *(tap.take(embeddings) for tap in self._taps())])

    def _compare(self, again: Tensor, before: Tensor) -> None:
        """Once, since it makes a GPU wait: a pass that differs would take the gradients elsewhere."""
        if self._compared or before.numel() == 0:
            return
        self._compared = True
        difference, largest = (again.detach() - before).abs().max(), before.abs().max()
        if difference > _SAME * largest:
            raise RuntimeError(
                "model: the second pass over a chunk gave other embeddings than the first, by up to "
                f"{difference:.3g} of {largest:.3g}, so its gradients would be wrong; draw random numbers from "
                "torch, and change nothing in a pass that the next one depends on"
            )


def _device_state(device: torch.device) -> Any:
    """The state of a device's generator; None on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _refuse_changing_norms(model: nn.Module) -> None:
    """Raise a ValueError for norms in training mode that depend on the other images or the earlier passes."""
    for name, module in model.named_modules():
        owner = name.split("parametrizations.")[0].rstrip(".") or type(module).__name__
        hooks = module._forward_pre_hooks.values()  # of the older torch.nn.utils.spectral_norm
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            fault = "batch norm in training mode, whose statistics would be those of a chunk, not of the batch"
        elif module.training and any(isinstance(x, _SPECTRAL) for x in (module, *hooks)):
            fault = "spectral norm in training mode, whose power iteration each pass over a chunk takes further"
        else:
            continue
        raise ValueError(
            f"model: {owner} has {fault}, so the loss and its gradients would differ; freeze it (its eval() "
            "after each model.train()), or take a network without it"
        )
