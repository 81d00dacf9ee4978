"""Base class of pair losses: computes in float32 or float64 and skips no pair."""

from typing import Any

import torch
from pytorch_metric_learning.losses import GenericPairLoss
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor

from ..functional.checks import OwnArguments, check_batch
from ..functional.precision import full_precision, without_autocast


class PairLoss(OwnArguments, GenericPairLoss):
    """Base of the losses on a matrix of distances and the masks of its positive and negative pairs.

    Half-precision embeddings are raised to float32, and autocast is off inside. Mined triplets count as pairs,
    each pair once. Unlike PML's pair losses, it also counts a pair that is the only one.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(mat_based_loss=True, **kwargs)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        check_batch(embeddings, labels, indices_tuple)
        if ref_emb is not None:
            check_batch(ref_emb, ref_labels, kind="ref_")
            ref_emb = full_precision(ref_emb)
        with without_autocast(embeddings):
            return super().forward(
                full_precision(embeddings), labels, indices_tuple, ref_emb, ref_labels
            )

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        c_f.labels_or_indices_tuple_required(labels, indices_tuple)
        # PML's distances would normalise both, and their gradients, even if they are one tensor.
        mat = self.distance(embeddings, None if ref_emb is embeddings else ref_emb)
        if indices_tuple is None:  # masks without index tuples: torch.compile can follow
            return self._compute_loss(mat, *lmu.get_matches_and_diffs(labels, ref_labels))
        return self.mat_based_loss(mat, lmu.convert_to_pairs(indices_tuple, labels, ref_labels))


def pairs(
    values: Tensor, mask: Tensor, reduction_type: str, divisor: int | Tensor
) -> dict[str, Any]:
    """A sub-loss for PML's reducers, "pos_pair" or "neg_pair": the values (N, M) where the mask (N, M) is set."""
    indices = torch.where(mask)
    return unreduced(values[indices], indices, reduction_type, int(divisor))


def unreduced(
    losses: Tensor, indices: Tensor | tuple[Tensor, ...], reduction_type: str, divisor: int
) -> dict[str, Any]:
    """A sub-loss for PML's reducers; 0 if there are no losses, of which a mean would be NaN."""
    if len(losses) == 0:
        return {"losses": 0, "indices": None, "reduction_type": "already_reduced"}
    part = {"losses": losses, "indices": indices, "reduction_type": reduction_type}
    return {**part, "divisor": divisor}
