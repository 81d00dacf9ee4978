"""Properties of every dataset whose `dataset[i, seed]` is a training view."""

import random
from typing import Any

import numpy as np
import torch


def assert_global_random_state_is_neither_read_nor_written(dataset: Any) -> None:
    """Checks the generators of `random`, numpy and torch."""
    before = _global_random_state()
    first = dataset[3, 9][0], dataset[3][0]
    assert _global_random_state() == before
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert torch.equal(first[0], dataset[3, 9][0])
    assert torch.equal(first[1], dataset[3][0])


def _global_random_state() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()  # noqa: NPY002, the global state is the subject
    return (
        random.getstate(),
        numpy_state[1].tolist(),
        numpy_state[2:],
        torch.get_rng_state().tolist(),
    )


def assert_workers_see_the_same(dataset: Any) -> None:
    """Data-loader workers, asked for indices and for pairs."""
    keys = [(3, 11), (4, 12), 5, 6]
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=[keys[:2], keys[2:]], num_workers=1)
    images, labels, indices = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(images, torch.stack([dataset[key][0] for key in keys]))
    assert indices.tolist() == [3, 4, 5, 6]
    assert torch.equal(labels, dataset.labels[3:7])
