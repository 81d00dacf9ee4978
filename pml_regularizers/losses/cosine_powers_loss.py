"""A metric loss, regularised by the same loss on powers of the pooled features' cosines."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..features.feature_loss import already_reduced
from .pooled_features_loss import PooledFeaturesLoss


class CosinePowersLoss(PooledFeaturesLoss):
    """A metric loss beside its `PooledFeaturesLoss`, in one object: short for `MultipleLosses` of the two.

        L = L(embeddings) + sum_k w_k L_k(features)

    It also hands on what `MultipleLosses` does not: `features=`, `enqueue_mask`, `get_logits`.

    Args:
        loss: Any PML loss, for the embeddings; without a `feature_loss`, copies of it serve the powers.
        powers, power_weights: As in `PooledFeaturesLoss`.
        feature_loss: The loss of the powers, if it differs from that of the embeddings. A loss with proxies or
            class weights needs one, as wide as the features: `ProxyAnchorLoss(num_classes, in_channels)`.
        **kwargs: As in `PooledFeaturesLoss`.

    Shape, Raises: As in `PooledFeaturesLoss`.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = CosinePowersLoss(losses.MultiSimilarityLoss())
        >>> embeddings, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> loss(embeddings, labels, features=torch.rand(4, 32)).shape
        torch.Size([])
    """

    width_hint = "; feature_loss=... takes one as wide as the features"

    def __init__(
        self,
        loss: nn.Module,
        *,
        powers: Sequence[int] = (2, 3),
        power_weights: float | Sequence[float] = 1.0,
        feature_loss: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if feature_loss is None or feature_loss is loss:
            feature_loss = copy.deepcopy(loss)
        else:
            self._argument = "feature_loss"
        super().__init__(feature_loss, powers=powers, power_weights=power_weights, **kwargs)
        self.check_wrapped("loss", loss)
        self.hold_losses({"embeddings": loss, **self.losses})

    def _sub_loss_names(self) -> list[str]:
        return ["embeddings", *super()._sub_loss_names()]

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        value = self.sub_loss("embeddings", embeddings, labels, indices_tuple)
        return {
            "embeddings": already_reduced(value),
            **super().compute_loss(embeddings, labels, indices_tuple),
        }
