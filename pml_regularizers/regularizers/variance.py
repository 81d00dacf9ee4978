"""Variance loss of second-order attention (Sun, Kamata, "Second-Order Estimation Based Attention Network for Metric
Learning").

    loss_var = 1/m sum_i (a_i - A_i)^2      eq. 3

with a the variance of m features over the batch, and A their predicted variance; `heads/variance_attention.py` has
the other equations, and says what the paper leaves open.
"""

from collections.abc import Mapping
from typing import Any

from pytorch_metric_learning.reducers import ClassWeightedReducer
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor, nn

from ..distributed import gather_features
from ..features.feature_loss import FeatureLoss
from ..offered.losses.variance_estimation_loss import VarianceEstimationLoss


class VarianceRegularizer(FeatureLoss, VarianceEstimationLoss, BaseRegularizer):
    """Regularizer that trains a `VEMAttention` to predict the variance of the features that it weighs (eq. 3).

    It reads no labels and no embeddings, ignores `indices_tuple`, and takes no `distance`. Add it to a metric loss,
    `MultipleLosses({"metric": loss, "variance": regularizer.attach(head)}, weights={"metric": 1, "variance": w})`,
    eq. 4; the paper's w is 1 (section III-B). The slot `embedding_regularizer=` of a PML loss takes it as well.
    Under `DistributedLoss` and PML's `DistributedLossWrapper` the variance is that of the whole batch.

    Args:
        unbiased: Take the variance with 1/(N-1) instead of 1/N; that of one sample is 0 either way.
        detach_features: Train only the prediction. Default: no, since eq. 6 also minimises over the trunk, so
            that the variance of the features moves towards its prediction.
        **kwargs: `reducer` and `collect_stats`, as in any PML loss.

    Default reducer: `MeanReducer()`, eq. 3.
    Reducer input: **loss**, the squared error of each feature's predicted variance, reduction type "element"; the
    elements are features, which have no labels: a `ClassWeightedReducer` is refused.

    Shape:
        features: the pair of (N, m), the features before the gate, and their predicted variance (N, m),
        every row the same, or (m,). It comes from `attach(head)`, or `attach(attention, embedder=network)`, or is
        passed, as in `features=(pooled, attention.variance)`.

    Raises:
        ValueError: if attached to a module without VEMAttention, or if the features do not fit.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> from pml_regularizers import EmbeddingHead, VEMAttention
        >>> head = EmbeddingHead(96, 32, attention=VEMAttention)
        >>> regularizer = VarianceRegularizer().attach(head)
        >>> regularizer(head(torch.randn(8, 96, 7, 7))).shape
        torch.Size([])
    """

    feature_names = ("attention",)

    def __init__(
        self, *, unbiased: bool = False, detach_features: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(unbiased=unbiased, **kwargs)
        self.detach_features = detach_features
        self.add_to_recordable_attributes(name="detach_features", is_stat=False)

    def compute_loss(self, embeddings: Tensor, *_: Any) -> dict[str, dict[str, Any]]:
        pooled, predicted = _pair(self.features)
        if self.detach_features:  # else eq. 6: the trunk is trained too
            pooled = pooled.detach()
        features, rows = gather_features([pooled, predicted.expand_as(pooled)], embeddings)
        parts: dict[str, dict[str, Any]] = super().compute_loss(features, None, None, rows, None)
        return parts

    def set_reducer(self, reducer: Any) -> None:
        if isinstance(reducer, ClassWeightedReducer):
            raise ValueError(
                "reducer: ClassWeightedReducer looks labels up, and the elements are features, which have none; "
                "choose another, such as MeanReducer()"
            )
        super().set_reducer(reducer)

    def _stages(self, source: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        stages = super()._stages(source)
        statistics = getattr(stages["attention"], "statistics", None)
        if not isinstance(statistics, nn.Module):
            raise ValueError(
                f"source: expected a VEMAttention or an EmbeddingHead that has one, got {type(source).__name__}; "
                "make the head with EmbeddingHead(..., attention=VEMAttention)"
            )
        return {"attention": statistics}


def _pair(features: Any) -> tuple[Tensor, Tensor]:
    parts = features if isinstance(features, tuple) else (features,)
    shapes = [tuple(part.shape) for part in parts]
    if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] not in (shapes[0], shapes[0][1:]):
        raise ValueError(
            "features: expected the pair of pooled features (N, m) and predicted variance (N, m) or (m,), got "
            f"shapes {', '.join(map(str, shapes))}; pass (pooled, attention.variance), or attach(head)"
        )
    return parts[0], parts[1]
