"""Contrastive loss on cosines, as HORDE (ICCV 2019) trains it in its Tables 1 and 2.

    L = mean over positive pairs of (1 - s)^2 / 2  +  mean over active negative pairs of (s - margin)_+ / 2

with s the cosine similarity of an ordered pair of different images; a negative pair is active where
s > margin = 0.5. The paper gives only the loss's name; squares, halves and means are those of the authors' code.
PML's `ContrastiveLoss` squares neither term, or both (with a power of a distance).
"""

from typing import Any

from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import DivisorReducer
from torch import Tensor

from ..functional.checks import number
from .pair_loss import PairLoss, pairs


class CosineContrastiveLoss(PairLoss):
    """Contrastive loss that is squared for positives (the gap to similarity 1) and linear for negatives.

    Args:
        pos_margin: Similarity above which a positive pair costs nothing; 1 in HORDE's code.
        neg_margin: Similarity below which a negative pair costs nothing; 0.5 in HORDE's code.
        **kwargs: `distance`, `reducer`, `collect_stats`, `embedding_regularizer`, as in any PML loss.

    Default distance: `CosineSimilarity()`. With a distance the signs turn: positives lie within
    `pos_margin`, negatives beyond `neg_margin`.
    Default reducer: `DivisorReducer()`, the means above. `MeanReducer()` averages over all negatives.
    Reducer input: **pos_loss**, one value per positive pair, reduction type "pos_pair"; **neg_loss**, one
    per negative pair, "neg_pair".

    Shape:
        embeddings (N, E), labels (N,); or a pair `indices_tuple`, or a reference set in the call.

    Example:
        >>> import torch
        >>> loss = CosineContrastiveLoss()
        >>> loss(torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 1]))
        tensor(0.7500)
    """

    def __init__(self, pos_margin: float = 1.0, neg_margin: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        number("pos_margin", pos_margin)
        number("neg_margin", neg_margin)
        self.pos_margin = pos_margin
        self.neg_margin = neg_margin
        self.add_to_recordable_attributes(list_of_names=["pos_margin", "neg_margin"], is_stat=False)

    def _compute_loss(
        self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor
    ) -> dict[str, dict[str, Any]]:
        attraction = self.distance.margin(mat, self.pos_margin).relu() ** 2 / 2
        repulsion = self.distance.margin(self.neg_margin, mat).relu() / 2
        active = (repulsion > 0) & (neg_mask != 0)
        return {
            "pos_loss": pairs(attraction, pos_mask, "pos_pair", divisor=pos_mask.sum()),
            "neg_loss": pairs(repulsion, neg_mask, "neg_pair", divisor=active.sum()),
        }

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]

    def get_default_distance(self) -> Any:
        return CosineSimilarity()

    def get_default_reducer(self) -> Any:
        return DivisorReducer()
