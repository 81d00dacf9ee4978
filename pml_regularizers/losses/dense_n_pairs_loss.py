"""N-pair loss over all negatives, as ECAML (AAAI 2019) trains it.

    L = sum over i of log(1 + sum over j with y_j != y_i of exp(x_i^T x_j - x_i^T x_{i+}))      eq. 9

The paper's batches hold two images of each class, so that x_{i+} is the other one; here every positive of i gives
a term. The default is the mean of the terms; `reducer=SumReducer()` gives eq. 9.

PML's `NPairsLoss` is a different loss: one image per class is an anchor, and only the positives of other classes
are its negatives. PML's `NTXentLoss(temperature=1)` on inner products equals this function until a pair costs about
80 in float32, and is nearly constant from there on; inner products are not bounded.
"""

from typing import Any

import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from torch import Tensor
from torch.nn import functional as F

from .pair_loss import PairLoss, pairs


class DenseNPairsLoss(PairLoss):
    """N-pair loss where every image is an anchor: its class gives the positives, all other classes the negatives.

    Args:
        **kwargs: `distance`, `reducer`, `collect_stats`, `embedding_regularizer`, as in any PML loss. The
            original N-pair loss (Sohn, 2016) penalises |x|^2; ECAML's equation does not.

    Default distance: `DotProductSimilarity(normalize_embeddings=False)`: eq. 9 takes inner products of embeddings
    that are not normalised.
    Default reducer: `MeanReducer()`, over the positive pairs. With eq. 9's `SumReducer()`, the value grows with the
    batch; `DivisorReducer()` divides the sum by the number of images.
    Reducer input: **loss**, one value per positive pair, reduction type "pos_pair".

    Shape:
        embeddings (N, E), labels (N,); or a pair `indices_tuple`, or a reference set in the call.

    Example:
        >>> import torch
        >>> loss = DenseNPairsLoss()
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))  # log(1 + 2)
        tensor(1.0986)
    """

    def _compute_loss(
        self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor
    ) -> dict[str, dict[str, Any]]:
        similarity = mat if self.distance.is_inverted else -mat
        # Not -inf: an anchor without negatives would compute inf - inf, eager or compiled.
        lowest = torch.finfo(mat.dtype).min
        negatives = similarity.masked_fill(neg_mask == 0, lowest).logsumexp(dim=1, keepdim=True)
        losses = F.softplus(negatives - similarity, threshold=40)  # eq. 9
        return {"loss": pairs(losses, pos_mask, "pos_pair", divisor=len(mat))}

    def get_default_distance(self) -> Any:
        return DotProductSimilarity(normalize_embeddings=False)
