"""Gradient caching for trunks whose activations do not fit into memory."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn


class TrunkChunks:
    """Gradient caching: the exact gradient of a whole batch's loss, with the trunk run in chunks.

    First the trunk runs without a graph, then the head and the loss run on the whole batch. Then the trunk runs
    again, chunk by chunk, with the gradient that reached its output. Its random numbers are the same in both
    passes. Gao, Zhang, Han and Callan, "Scaling deep contrastive learning batch size under memory limited setup"
    (RepL4NLP 2021), cut behind the embeddings; here the cut is behind the trunk, so that losses may read what the
    head computes.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, images: Tensor, chunk_size: int
    ) -> None:
        self._accelerator = accelerator
        self._model: Any = accelerator.unwrap_model(model)
        self._chunks = images.split(chunk_size)
        self._seed = torch.initial_seed()

    def embed(self) -> Tensor:
        """The embeddings of the batch, with a graph down to the trunk's output."""
        with torch.no_grad():
            outputs = [self._trunk(i) for i in range(len(self._chunks))]
        self._output = torch.cat(outputs).requires_grad_()
        with self._accelerator.autocast():
            embeddings: Tensor = self._model.head(self._output)
        return embeddings.float() if self._output.dtype != torch.float64 else embeddings

    def backward(self) -> None:
        """After the loss's backward pass: compute the trunk's gradient, averaged over processes as in DDP."""
        assert self._output.grad is not None
        rows = self._output.grad.split([len(chunk) for chunk in self._chunks])
        for i, gradient in enumerate(rows):
            self._trunk(i).backward(gradient)
        if self._accelerator.num_processes > 1:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")

    def _trunk(self, i: int) -> Tensor:
        with torch.random.fork_rng(), self._accelerator.autocast():
            torch.manual_seed((self._seed + i + 1) % 2**64)
            output: Tensor = self._model.trunk(self._chunks[i])
        return output
