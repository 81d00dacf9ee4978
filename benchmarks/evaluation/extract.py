"""Reads a network's pooled features, and HORDE's descriptor, while its images are embedded."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pml_regularizers import EmbeddingHead, HORDELoss
from pml_regularizers.functional.precision import full_precision


class Extract:
    """After a forward pass: HORDE's descriptor and the pooled features of its images, side by side.

    A context, in which the model's head is watched.

    Attributes:
        widths: Of these parts, by name; 0 before the first pass.
    """

    def __init__(self, model: nn.Module, horde: HORDELoss | None, *, features: bool) -> None:
        self.horde = horde
        self.head = next((m for m in model.modules() if isinstance(m, EmbeddingHead)), None)
        names = {"descriptor": horde is not None, "features": features}
        self.widths = {name: 0 for name, wanted in names.items() if wanted}
        self._pooled: list[Tensor] = []

    def __enter__(self) -> Self:
        if "features" in self.widths:
            assert self.head is not None
            self._hook = self.head.pooled.register_forward_hook(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        if "features" in self.widths:
            self._hook.remove()

    def _see(self, module: nn.Module, arguments: Any, pooled: Tensor) -> None:
        self._pooled.append(pooled)

    def __call__(self, embeddings: Tensor) -> Tensor:
        parts = [] if self.horde is None else [self.horde.descriptor(embeddings)]
        if "features" in self.widths:
            parts.append(full_precision(self._pooled.pop()))
        self.widths = dict(zip(self.widths, (part.shape[1] for part in parts), strict=True))
        return torch.cat(parts, dim=1)

    def split(self, rows: Tensor | None) -> dict[str, Tensor]:
        """The parts by name, from rows of all of them."""
        if rows is None:
            return {}
        parts = rows.split([*self.widths.values()], dim=1)
        return dict(zip(self.widths, parts, strict=True))


def class_cosines(features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cosine of pairs of one class, and of two classes; NaN without such pairs.

    Args:
        features: (n, D).
        labels: (n,).
    """
    x = normalize(features.double())
    _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = x.new_zeros(len(counts), x.shape[1]).index_add(0, classes, x)
    within, all_pairs = sums.square().sum(), sums.sum(dim=0).square().sum()
    same = int((counts * (counts - 1)).sum())
    others = len(x) ** 2 - int((counts**2).sum())
    cosines = (within - len(x)) / same, (all_pairs - within) / others
    return float(cosines[0]), float(cosines[1])
