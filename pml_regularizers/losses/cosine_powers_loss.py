"""A metric loss on powers of the cosines of pooled features: what HORDE's sketches estimate, exactly.

    L = L(embeddings) + sum_k w_k L_k        L_k: the same loss, for which the similarity of images i and j
                                             is cos(x_i, x_j)^k, x their pooled features

Ours, from no paper. cos(x, y)^k is the cosine of the k-fold tensor products of x and y, their k-th moments in
HORDE (ICCV 2019, eq. 3) if an image has one position. So this is HORDE without positions, projections and
parameters; the matrix of cosines, which a loss computes anyway, takes the place of the sketches.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance
from pytorch_metric_learning.losses import AngularLoss, VICRegLoss
from torch import Tensor, nn

from ..distributed import gather_features
from ..features.feature_loss import already_reduced
from ..functional.checks import at_least
from .per_output_loss import PerOutputLoss


class CosinePowersLoss(PerOutputLoss):
    """A metric loss, regularised by the same loss on powers of the pooled features' cosines.

    The embeddings, and each power, have a deep copy of the loss; the copies are trained, the original is not. A
    mined `indices_tuple` serves all of them.

    Args:
        loss: Any PML loss on cosines or on Euclidean distances of normalised vectors, which are
            sqrt(2 - 2 cos^k). `AngularLoss` and `VICRegLoss` read vectors themselves, and are refused.
        powers: The powers k. Default: those that helped in our studies.
        power_weight: w_k, the weight of each power.
        feature_loss: Loss of the powers if it differs from that of the embeddings. A loss with proxies or class
            weights needs one, as wide as the features: `ProxyAnchorLoss(num_classes, in_channels)`.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C), at least two-dimensional.
        Pass the features as `features=`, or let `attach(head)` record the head's `pooled`.

    Raises:
        ValueError: for arguments out of range, a loss on other distances, or that does not return one number, or
            that reads features itself; for `reducer=` or `distance=`, which belong to the loss; in the call, for
            features that are no matrix.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = CosinePowersLoss(losses.MultiSimilarityLoss())
        >>> embeddings, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> loss(embeddings, labels, features=torch.randn(4, 32)).shape
        torch.Size([])
    """

    feature_names = ("pooled",)
    nested_feature_loss_hint = "itself; add it beside this one with MultipleLosses"
    width_hint = "; feature_loss=... takes one as wide as the features"

    def __init__(
        self,
        loss: nn.Module,
        *,
        powers: Sequence[int] = (2, 3),
        power_weight: float = 1.0,
        feature_loss: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self.powers = list(powers)  # before super().__init__: PML asks for the sub-loss names there
        super().__init__(**kwargs)
        self.power_weight = power_weight
        if not self.powers:
            raise ValueError("powers: expected one or more numbers, got none")
        for k in self.powers:
            at_least("powers", k, 1)
        at_least("power_weight", power_weight, 0)
        feature_loss = loss if feature_loss is None else feature_loss
        self.check_wrapped("loss", loss)
        self.check_wrapped("feature_loss", feature_loss)
        raised = [with_power(feature_loss, k) for k in self.powers]
        self.copy_losses(dict(zip(self._sub_loss_names(), [loss, *raised], strict=True)))
        self.add_to_recordable_attributes(list_of_names=["powers", "power_weight"], is_stat=False)

    def _sub_loss_names(self) -> list[str]:
        return ["embeddings", *(f"power_{k}" for k in self.powers)]

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        features = self.features
        if features.ndim != 2:
            raise ValueError(
                f"features: expected pooled features (N, C), got shape {tuple(features.shape)}; attach to an "
                "EmbeddingHead, or pool them"
            )
        (rows,) = gather_features([features], embeddings)
        compared = {name: embeddings if name == "embeddings" else rows for name in self.losses}
        return {
            name: already_reduced(value if name == "embeddings" else self.power_weight * value)
            for name, vectors in compared.items()
            for value in [self.sub_loss(name, vectors, labels, indices_tuple)]
        }


def with_power(loss: nn.Module, k: int) -> nn.Module:
    """A copy of a loss on the k-th power of the cosine.

    Raises:
        ValueError: if it compares otherwise.
    """
    loss = copy.deepcopy(loss)
    for module in list(loss.modules()):
        if isinstance(module, (AngularLoss, VICRegLoss)):
            raise ValueError(f"loss: {type(module).__name__} reads vectors, not their cosines")
        if getattr(module, "distance", None) is not None:
            module.distance = _power(module.distance, k)
    return loss


def _power(distance: Any, k: int) -> Any:
    """The distance of the k-fold tensor products, for one of normalised vectors."""
    if distance.normalize_embeddings and distance.p == 2:
        if isinstance(distance, DotProductSimilarity):
            distance = copy.copy(distance)  # several losses may share one
            distance.power *= k
            return distance
        if type(distance) is LpDistance:
            return TensorProductDistance(k, power=distance.power)
    raise ValueError(
        f"loss: expected one on CosineSimilarity or the normalised LpDistance(p=2), got {distance}"
    )


class TensorProductDistance(LpDistance):
    """Euclidean distance of the k-fold tensor products of normalised vectors: sqrt(2 - 2 <x, y>^k)."""

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor:
        ref_emb = query_emb if ref_emb is None else ref_emb
        return self._distance(query_emb @ ref_emb.T)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self._distance((query_emb * ref_emb).sum(dim=1))

    def _distance(self, cosine: Tensor) -> Tensor:
        squared = 2 - 2 * cosine**self.k
        near = squared <= torch.finfo(squared.dtype).eps  # of zero, with no gradient, as cdist
        return squared.masked_fill(near, 1).sqrt().masked_fill(near, 0)
