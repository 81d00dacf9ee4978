"""Reads a network's features, and HORDE's descriptor, while its images are embedded."""

from math import nan
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pml_regularizers import EmbeddingHead, HORDELoss
from pml_regularizers.functional.precision import full_precision


class Extract:
    """After a forward pass: HORDE's descriptor and the features of its images, side by side.

    A context, in which the model's head is watched.

    Args:
        features: Read the pooled features.
        layer: Also read the features that the head's linear layer takes, where they are others: behind an
            attention.

    Attributes:
        widths: Of these parts, by name; empty before the first pass.
    """

    def __init__(
        self,
        model: nn.Module,
        horde: HORDELoss | None = None,
        *,
        features: bool = True,
        layer: bool = False,
    ) -> None:
        self.horde, self.wanted = horde, features or horde is not None
        head = next((m for m in model.modules() if isinstance(m, EmbeddingHead)), None)
        self._watched: dict[str, nn.Module] = {}
        if features:
            assert head is not None
            self._watched["features"] = head.pooled
            if layer and head.attention is not None:
                self._watched["layer"] = head.fc
        self._seen: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}

    def __enter__(self) -> Self:
        def watch(name: str, module: nn.Module) -> Any:
            return module.register_forward_pre_hook(
                lambda module, inputs: self._seen.update({name: inputs[0]})
            )

        self._hooks = [watch(name, module) for name, module in self._watched.items()]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def __call__(self, embeddings: Tensor) -> Tensor:
        parts = {}
        if self.horde is not None:
            parts["descriptor"] = self.horde.descriptor(embeddings)
        parts |= {name: full_precision(self._seen[name]) for name in self._watched}
        self.widths = {name: part.shape[1] for name, part in parts.items()}
        return torch.cat([*parts.values()], dim=1)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """The parts by name, from rows of all of them."""
        parts = rows.split([*self.widths.values()], dim=1)
        return dict(zip(self.widths, parts, strict=True))


def effective_rank(vectors: Tensor) -> float:
    """Effective rank of vectors (n, D) (Roy and Vetterli, 2007): exp of the entropy of their singular values.

    Of the centred unit vectors; 1 if all lie on a line, at most min(n - 1, D), 0 if all are equal.
    """
    x = normalize(vectors.cpu().double())
    values = torch.linalg.svdvals(x - x.mean(dim=0))
    parts = values / values.sum()
    rank = float(torch.special.entr(parts).sum().exp())
    return rank if rank > 0 else 0.0


def class_cosines(features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cosine of pairs of features (n, D) of one class, and of two classes; NaN without such pairs."""
    x = normalize(features.double())
    _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = x.new_zeros(len(counts), x.shape[1]).index_add(0, classes, x)
    within, all_pairs = sums.square().sum(), sums.sum(dim=0).square().sum()
    same = int((counts * (counts - 1)).sum())
    others = len(x) ** 2 - int((counts**2).sum())
    # Rounding makes the sum over no pairs another number than 0, and a division by 0 infinite.
    totals = ((within - len(x)).item(), same), ((all_pairs - within).item(), others)
    of_one, of_two = (total / pairs if pairs else nan for total, pairs in totals)
    return of_one, of_two
