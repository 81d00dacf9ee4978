"""Gradient caching: the gradients of a large batch, with the memory of a small one.

Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (RepL4NLP 2021).

A metric loss compares the images of a batch; what the network computes for one image does not depend on the others:

1. The network embeds the batch in chunks, without a graph.
2. The backward pass of the loss of the whole batch gives its gradient at the embeddings.
3. There, each chunk passes the network again, with a graph, which takes that gradient back to the parameters.

The paper caches the gradient at the embeddings; here also that at the features that the loss reads.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .chunked_batch import ChunkedBatch, modes_of
from .functional.checks import check_module, whole_numbers


class GradientCache:
    """A network that embeds a batch in chunks; the gradients are those of one pass over the whole batch.

    Call it in place of the network: the loss's own backward pass runs the chunks again, and adds the gradients of
    the network's parameters. Losses that read features find them as after one pass, if they are attached to a head,
    or with `embedder=`. Miners, `MultipleLosses`, `CrossBatchMemory` and gradient scalers work as without it, and
    so do several calls before a backward pass.

    The network runs forward twice. Memory is that of a chunk's activations, and of the batch's embeddings and
    features that the loss reads, with their gradients. Dropout and other random numbers of torch are the same in
    both passes of a chunk. Under DistributedDataParallel the gradients are averaged once, with the last chunk.

    The first call, and more while their images are alike, also passes some images beside others: a layer that mixes
    images, such as batch norm in training mode, is refused, and so is one whose buffers each pass changes. A layer
    that mixes them in its backward pass alone, as a hook on gradients may, is not seen.

    Args:
        model: The network. It takes what the cache is called with: trees of tensors of N rows, which are split, and
            anything else. It returns embeddings (N, E), or a tree of such tensors, such as Hugging Face's outputs.
        loss: The loss, or a wrapper of it, whose parts that read features are attached to the network.
        chunk_size: Images in a pass of each process; the last chunk may be smaller.

    Raises:
        ValueError: for chunk_size < 1; in the call, for a network that mixes images or changes its buffers, and for
            tensors, given or returned, that do not have one row for each image.
        MissingFeaturesError: in the call, if the features of a chunk are not known to be those of its embeddings.
        RuntimeError: in the loss's backward pass, if the network, its mode or the images have changed since the
            call, if the second pass gives other embeddings, as with random numbers that are not torch's, and for
            `create_graph=True`; if some parameters have hooks, for gradients of chosen tensors, as by
            `backward(inputs=...)`.

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
        >>> head.fc.weight.grad.shape
        torch.Size([8, 32])
    """

    def __init__(self, model: nn.Module, loss: nn.Module, chunk_size: int) -> None:
        check_module("model", model)
        check_module("loss", loss)
        whole_numbers(chunk_size=chunk_size)
        self.model = model
        self.loss = loss
        self.chunk_size = chunk_size
        # Modes of the network's modules, and whether there were several chunks.
        self._checked: set[tuple[Any, bool]] = set()
        self._compared = False
        self._came = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Embed the batch, and give the losses its features: what the network returns, joined."""
        # Weights that it keeps from the first pass would have no gradient in the second.
        if parametrize._cache_enabled:
            raise ValueError(
                "GradientCache: called inside torch.nn.utils.parametrize.cached(), expected outside"
            )
        batch = ChunkedBatch(self.model, self.loss, self.chunk_size, args, kwargs)
        modes, several = modes_of(self.model), len(batch.chunks) > 1
        batch.embed(check=batch.size > 1 and (modes, several) not in self._checked)
        if batch.checked:
            self._checked |= {(modes, several), (modes, False)}
        outputs = batch.outputs
        if batch.trains:
            start = torch.empty(0, requires_grad=True)  # since the images may need no gradient
            outputs = list(_Chunks.apply(self, batch, start, *batch.tensors, *batch.linked))
        batch.tensors, batch.outputs = [], []  # the latter lead back to the batch
        result, *features = batch.tree(outputs)
        for tap, own in zip(batch.taps, features, strict=True):
            tap.put(own, result)
        return result

    def backward(self) -> None:
        """Nothing is left to do here: the loss's own backward pass brings the gradients.

        Raises:
            RuntimeError: if none have come since the last call of this method.
        """
        if not self._came:
            raise RuntimeError(
                "backward: no gradient has come from a loss; call embeddings = cache(images) and "
                "loss(embeddings, labels).backward(), which is all that a batch needs"
            )
        self._came = False


class _Chunks(torch.autograd.Function):
    """The outputs for a batch; its backward pass is the second pass over the chunks."""

    @staticmethod
    def forward(
        ctx: Any, cache: GradientCache, batch: ChunkedBatch, start: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cache, ctx.batch = cache, batch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[: len(batch.tensors)])  # which refuses overwritten ones
        ctx.mark_non_differentiable(*(x for x in batch.outputs if not x.is_floating_point()))
        return tuple(batch.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # A GPU would wait for the comparison: there it is made in the first step.
        compare = not (ctx.batch.devices and ctx.cache._compared)
        # Not in torch.autograd.grad, nor in backward(inputs=...): these take the gradients that are returned.
        accumulate = torch._C._will_engine_execute_node(ctx.next_functions[0][0])  # that of `start`
        own = ctx.batch.backward(
            ctx.saved_tensors, gradients, accumulate=accumulate, compare=compare
        )
        ctx.cache._compared = ctx.cache._came = True
        return None, None, None, *own
