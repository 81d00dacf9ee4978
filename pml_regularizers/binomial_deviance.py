"""Binomial deviance loss (Yi, Lei, Li, "Deep metric learning for practical person re-identification", 2014).

    L_i = mean_{j in P_i} log(1 + exp(-alpha (s_ij - beta))) + mean_{j in N_i} log(1 + exp(alpha C (s_ij - beta)))

with s the cosine similarity, P_i the other images of i's class and N_i those of other classes. This is the
loss that HORDE (ICCV 2019) trains in its Tables 1 to 5; its settings and its sum over the anchors i are
those of the authors' code. An anchor without positives adds only its negatives, and the other way round.
"""

from typing import Any

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import GenericPairLoss
from pytorch_metric_learning.reducers import SumReducer
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor
from torch.nn import functional as F

from .precision import full_precision


class BinomialDevianceLoss(GenericPairLoss):
    """Soft margin on every pair: log(1 + exp(.)) of its signed distance to a boundary.

    Half-precision embeddings are raised to float32 and autocast is off inside: the factor alpha * C
    would turn their rounding of a similarity into a tenth of the loss.

    Args:
        alpha: Steepness, 2 in HORDE's code.
        beta: Boundary between positives and negatives, a similarity; 0.5 in HORDE's code.
        negative_weight: C, inside the exponent; 25 in HORDE's code.
        **kwargs: `distance`, `reducer`, `collect_stats`, `embedding_regularizer`, as in any PML loss.

    Default distance: `CosineSimilarity()`. Default reducer: `SumReducer()`, so the value grows with the
    batch; `MeanReducer()` averages over the anchors instead.
    Reducer input: **loss**, one value per anchor, reduction type "element".

    Shape:
        embeddings (N, E), labels (N,); or a pair `indices_tuple`, or a reference set.

    Example:
        >>> import torch
        >>> loss = BinomialDevianceLoss()
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(5.2530)
    """

    def __init__(
        self, alpha: float = 2.0, beta: float = 0.5, negative_weight: float = 25.0, **kwargs: Any
    ) -> None:
        super().__init__(mat_based_loss=True, **kwargs)
        for name, value in (("alpha", alpha), ("negative_weight", negative_weight)):
            if value <= 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        self.alpha = alpha
        self.beta = beta
        self.negative_weight = negative_weight
        self.add_to_recordable_attributes(
            list_of_names=["alpha", "beta", "negative_weight"], is_stat=False
        )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        if ref_emb is not None:
            ref_emb = full_precision(ref_emb)
        with torch.autocast(embeddings.device.type, enabled=False):
            return super().forward(
                full_precision(embeddings), labels, indices_tuple, ref_emb, ref_labels
            )

    def _compute_loss(
        self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor
    ) -> dict[str, dict[str, Any]]:
        too_far = self.distance.margin(mat, self.beta)  # beta - s for similarities
        positives = _softplus(self.alpha * too_far)
        negatives = _softplus(-self.alpha * self.negative_weight * too_far)
        losses = _row_mean(positives, pos_mask) + _row_mean(negatives, neg_mask)
        return {
            "loss": {
                "losses": losses,
                "indices": c_f.torch_arange_from_size(mat),
                "reduction_type": "element",
            }
        }

    def get_default_distance(self) -> Any:
        return CosineSimilarity()

    def get_default_reducer(self) -> Any:
        return SumReducer()


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact in float64: torch's default gives x from 20 on, an error of 2e-9."""
    return F.softplus(x, threshold=40)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(mask == 0, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
