"""The inputs of a head's last layer for all images of a loader, on one process or many."""

from collections.abc import Iterable, Sized
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from ..functional.checks import check_module
from ..functional.precision import full_precision
from .trunk_output import as_taken, evaluating

Rows = tuple[Tensor, Tensor]


def extract_features(
    trunk: nn.Module, head: nn.Module, loader: Iterable[Any], *, progress: bool
) -> Rows:
    """The input of `head.fc` while `head(trunk(images))` runs; see `EmbeddingHead.extract_features`."""
    check_module("trunk", trunk)
    several = dist.is_available() and dist.is_initialized()
    rank, processes = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    by_row = isinstance(getattr(loader, "sampler", None), DistributedSampler)
    divided = by_row or hasattr(loader, "total_batch_size")  # Accelerate's loaders have it
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[:] = [
            full_precision(inputs[0]).cpu()
        ]  # the last: attached losses may use the layer, too

    own = next(chain(trunk.parameters(), head.parameters()), torch.empty(0))
    bar = tqdm(loader, desc="features", unit="batch", disable=not progress or rank > 0)
    mine: list[Rows] = []
    handle = head.get_submodule("fc").register_forward_pre_hook(see)
    try:
        with evaluating(trunk, head):
            for number, batch in enumerate(bar):
                if divided or number % processes == rank:
                    images, labels = _images_and_labels(batch)
                    head(trunk(as_taken(images, own)))
                    mine.append((seen.pop(), labels.cpu()))
    finally:
        handle.remove()
    every = [mine]
    if several:
        every = [[] for _ in range(processes)]
        dist.all_gather_object(every, mine)
    if by_row:  # these samplers deal images, Accelerate's deal batches
        every = [[row for batch in part for row in _rows(batch)] for part in every]
    # In turns, as they were dealt: images that fill up the last turn stand at the end.
    batches = [batch for turn in zip_longest(*every) for batch in turn if batch is not None]
    if not batches:
        raise ValueError(
            "loader: gave no batch; expected (images, labels), so pass one with images"
        )
    features, all_labels = (torch.cat(column) for column in zip(*batches, strict=True))
    if divided and isinstance(dataset := getattr(loader, "dataset", None), Sized):
        features, all_labels = features[: len(dataset)], all_labels[: len(dataset)]
    return features, all_labels


def _images_and_labels(batch: Any) -> Rows:
    match batch:
        case [Tensor() as images, Tensor() as labels, *_] if len(images) == len(labels):
            return images, labels
    raise ValueError(
        f"loader: expected batches (images, labels, ...), two tensors of equal length, got {type(batch).__name__}; "
        "give the loader a collate_fn that returns them"
    )


def _rows(batch: Rows) -> list[Rows]:
    return list(zip(*(column.split(1) for column in batch), strict=True))
