"""A metric loss on powers of the cosines of pooled features: what HORDE's sketches estimate, exactly.

    L = L(embeddings) + sum_k w_k L_k        L_k: the same loss, for which the similarity of images i and j
                                             is cos(x_i, x_j)^k, x their pooled features

Ours, from no paper. cos(x, y)^k is the cosine of the k-fold tensor products of x and y, their k-th moments in
HORDE (ICCV 2019, eq. 3) if an image has one position. So this is HORDE without positions, projections and
parameters; the matrix of cosines, which a loss computes anyway, takes the place of the sketches.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pytorch_metric_learning.distances import (
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
)
from pytorch_metric_learning.losses import (
    AngularLoss,
    P2SGradLoss,
    ThresholdConsistentMarginLoss,
    VICRegLoss,
)
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor, nn

from ..distributed import gather_features
from ..features.feature_loss import already_reduced
from ..functional.checks import at_least
from .per_output_loss import PerOutputLoss

READ_VECTORS = (AngularLoss, P2SGradLoss, ThresholdConsistentMarginLoss, VICRegLoss)
"""PML's losses that compare vectors otherwise than by their `distance`."""


class CosinePowersLoss(PerOutputLoss):
    """A metric loss, regularised by the same loss on powers of the pooled features' cosines.

    The embeddings, and each power, have a deep copy of the loss, which is trained in its place. A mined
    `indices_tuple` serves all of them.

    Args:
        loss: Any PML loss on cosines or on Euclidean distances of normalised vectors, which are
            sqrt(2 - 2 cos^k). `AngularLoss`, `P2SGradLoss`, `ThresholdConsistentMarginLoss` and `VICRegLoss` read
            vectors themselves, and are refused; a loss of your own must compare by its `distance` alone.
        powers: The powers k. Default: those that helped in our studies.
        power_weight: w_k, the weight of each power.
        feature_loss: Loss of the powers if it differs from that of the embeddings. A loss with proxies or class
            weights needs one, as wide as the features: `ProxyAnchorLoss(num_classes, in_channels)`.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C).
        Pass the features as `features=`, or let `attach(head)` record the head's `pooled`.

    Raises:
        ValueError: for arguments out of range, a loss on other distances, or that does not return one number or
            reads features; for `reducer=` or `distance=`, which belong to it; in the call, for features that are no
            matrix.
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
        self.powers = _different(powers)  # before super().__init__: PML asks for the sub-loss names
        super().__init__(**kwargs)
        self.power_weight = power_weight
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


def _different(powers: Any) -> list[int]:
    """The powers, if they can be."""
    numbers = list(powers) if isinstance(powers, Iterable) else []
    whole = all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in numbers)
    if not numbers or not whole or len({*numbers}) < len(numbers):
        raise ValueError(f"powers: expected different whole numbers above 0, got {powers!r}")
    return numbers


def with_power(loss: nn.Module, k: int) -> nn.Module:
    """A copy of a loss on the k-th power of the cosine; a ValueError if it compares otherwise."""
    loss = copy.deepcopy(loss)
    for module in list(loss.modules()):
        if isinstance(module, READ_VECTORS):
            raise ValueError(f"loss: {type(module).__name__} reads vectors, not their cosines")
        if isinstance(module, BaseRegularizer):  # its distance is its own
            continue
        if getattr(module, "distance", None) is not None:
            module.distance = _power(module.distance, k)
    return loss


def _power(distance: Any, k: int) -> nn.Module:
    """The distance of the k-fold tensor products, for one of normalised vectors."""
    if distance.normalize_embeddings and distance.p == 2:
        if isinstance(distance, DotProductSimilarity):
            return TensorProductSimilarity(k, power=distance.power)
        if type(distance) is LpDistance:
            return TensorProductDistance(k, power=distance.power)
    raise ValueError(
        f"loss: expected one on CosineSimilarity or the normalised LpDistance(p=2), got {type(distance).__name__}("
        f"p={distance.p}, normalize_embeddings={distance.normalize_embeddings})"
    )


class TensorProductSimilarity(CosineSimilarity):
    """Cosine of the k-fold tensor products: <x, y>^k, of normalised vectors."""

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        cosine: Tensor = super().compute_mat(query_emb, ref_emb)
        return cosine**self.k

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        cosine: Tensor = super().pairwise_distance(query_emb, ref_emb)
        return cosine**self.k


class TensorProductDistance(LpDistance):
    """Euclidean distance of the k-fold tensor products of normalised vectors: sqrt(2 - 2 <x, y>^k).

    As |x - y| sqrt(1 + c + ... + c^(k-1)), c = <x, y>, which does not cancel where x and y are near.
    """

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor:
        ref_emb = query_emb if ref_emb is None else ref_emb
        distance: Tensor = super().compute_mat(query_emb, ref_emb)
        return distance * self._stretch(query_emb @ ref_emb.T)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        distance: Tensor = super().pairwise_distance(query_emb, ref_emb)
        return distance * self._stretch((query_emb * ref_emb).sum(dim=1))

    def _stretch(self, cosine: Tensor) -> Tensor:
        total = torch.ones_like(cosine)
        for _ in range(self.k - 1):
            total = 1 + total * cosine
        return total.clamp(min=torch.finfo(cosine.dtype).eps).sqrt()
