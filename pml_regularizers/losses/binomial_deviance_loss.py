"""Binomial deviance loss (Yi, Lei, Li, "Deep metric learning for practical person re-identification", 2014).

    L_i = mean_{j in P_i} log(1 + exp(-alpha (s_ij - beta))) + mean_{j in N_i} log(1 + exp(alpha C (s_ij - beta)))

with s the cosine similarity, P_i the other images of i's class and N_i those of other classes; the mean over the
anchors i. HORDE (ICCV 2019) uses it in its Tables 1 to 5; the settings are those of the authors' code, which
sums over the anchors: `reducer=SumReducer()`. An anchor without positives adds only its negatives, and vice versa.

ECAML (AAAI 2019) sums over anchors and pairs, eq. 10: `balanced=False, reducer=SumReducer()`. Read literally, the
equation also pairs each image with itself, a constant; it is left out.
"""

from typing import Any

from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor
from torch.nn import functional as F

from ..functional.checks import number
from .pair_loss import PairLoss, unreduced


class BinomialDevianceLoss(PairLoss):
    """Soft margin on every pair: log(1 + exp(.)) of its signed distance to a boundary.

    Args:
        alpha: Steepness, 2 in HORDE's code.
        beta: Boundary between positives and negatives, a similarity; 0.5 in HORDE's code.
        negative_weight: C, inside the exponent; 25 in HORDE's code and in ECAML, eq. 10 (eta there).
        balanced: Average over each anchor's positives and over its negatives, as HORDE's code does; if False, sum
            over them, ECAML's eq. 10.
        **kwargs: `distance`, `reducer`, `collect_stats`, `embedding_regularizer`, as in any PML loss.

    Default distance: `CosineSimilarity()`. Default reducer: `MeanReducer()`, over the anchors. With the papers'
    `SumReducer()`, the value grows with the batch, and beside a regularizer that averages so does its weight.
    Reducer input: **loss**, one value per anchor, reduction type "element".

    Shape:
        embeddings (N, E), labels (N,); or a pair `indices_tuple`, or a reference set in the call.
        PML's `CrossBatchMemory` and `SelfSupervisedLoss` accept only losses that they know, not this one.

    Example:
        >>> import torch
        >>> loss = BinomialDevianceLoss()
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.3133)
    """

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 0.5,
        negative_weight: float = 25.0,
        *,
        balanced: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        number("alpha", alpha, above=0)
        number("beta", beta)
        number("negative_weight", negative_weight, above=0)
        self.alpha = alpha
        self.beta = beta
        self.negative_weight = negative_weight
        self.balanced = balanced
        self.add_to_recordable_attributes(
            list_of_names=["alpha", "beta", "negative_weight", "balanced"], is_stat=False
        )

    def _compute_loss(
        self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor
    ) -> dict[str, dict[str, Any]]:
        too_far = self.distance.margin(mat, self.beta)  # beta - s for similarities
        positives = _softplus(self.alpha * too_far)
        negatives = _softplus(-self.alpha * self.negative_weight * too_far)
        over = _row_mean if self.balanced else _row_sum  # the sum: ECAML, eq. 10
        losses = over(positives, pos_mask) + over(negatives, neg_mask)
        return {"loss": unreduced(losses, c_f.torch_arange_from_size(mat), "element", len(mat))}

    def get_default_distance(self) -> Any:
        return CosineSimilarity()


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact in float64: from 20 on, torch's default returns x, an error of 2e-9."""
    return F.softplus(x, threshold=40)


def _row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(mask == 0, 0).sum(dim=1)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return _row_sum(values, mask) / mask.sum(dim=1).clamp(min=1)
