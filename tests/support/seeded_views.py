"""Properties of every dataset whose `dataset[i, seed]` is a training view."""

import random
from typing import Any

import numpy as np
import torch


def assert_global_random_state_is_neither_read_nor_written(dataset: Any) -> None:
    """Checks the generators of `random`, numpy and torch."""
    views, draws = [], []
    for seed in (1, 1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  the global generator is the subject
        torch.manual_seed(seed)
        if draws:  # the first draws are those without a view
            views.append((dataset[3, 9][0], dataset[3][0]))
        draws.append((random.random(), np.random.rand(), torch.rand(1)))  # noqa: NPY002
    assert draws[0] == draws[1] != draws[2]
    torch.testing.assert_close(*views, rtol=0, atol=0)


def assert_workers_see_the_same(dataset: Any) -> None:
    """Data-loader workers, asked for indices and for pairs."""
    keys = [(3, 11), (4, 12), 5, 6]
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=[keys[:2], keys[2:]], num_workers=1)
    images, labels, indices = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(images, torch.stack([dataset[key][0] for key in keys]))
    assert indices.tolist() == [3, 4, 5, 6]
    assert torch.equal(labels, dataset.labels[3:7])
