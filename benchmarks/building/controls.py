"""Controls: losses that do a part of what a method does, to see which part helps.

HORDE's orders 2 and 3 with sketches are metric losses on estimates of <mean_p x_p^(k), mean_q y_q^(k)>, the inner
products of an image's k-th moments over its positions. From there to the base loss, each control leaves one more
thing out:

| control | positions | sketches | power of the cosine |
|---|---|---|---|
| `HORDELoss` | yes | yes | k |
| `OnePositionHORDELoss` | no: the pooled features alone | yes | k |
| `FeatureCosinesLoss`, with a distance of power k | no | no: <x, y>^k exactly | k |
| `FeatureCosinesLoss`, `PooledFeaturesLoss` | no | no, or one of order 1 | 1 |
| `LinearHeadLoss` | no | no: a trained layer | 1 |

The power is that of PML's own distances: `CosineSimilarity(power=2)`.
"""

from typing import Any

import torch
from pytorch_metric_learning.losses import CosFaceLoss, ProxyAnchorLoss
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import HORDELoss
from pml_regularizers.distributed import gather_features
from pml_regularizers.features.feature_loss import already_reduced
from pml_regularizers.losses.per_output_loss import PerOutputLoss


class PooledLoss(PerOutputLoss):
    """Base of the controls: a metric loss on vectors made of the pooled features.

    Args:
        loss: Any PML loss that fits the vectors' width.
        **kwargs: As in any PML loss, except `reducer` and `distance`, which belong to `loss`.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C).
    """

    feature_names = ("pooled",)

    def __init__(self, loss: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check_wrapped("loss", loss)
        self.hold_losses({"pooled": loss})

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, dict[str, Any]]:
        (rows,) = gather_features([self.vectors(self.features)], embeddings)
        value = self.sub_loss("pooled", self.compared(rows), labels, indices_tuple)
        return {"loss": already_reduced(value)}

    def vectors(self, features: Tensor) -> Tensor:
        """The vectors of this process's images (n, D), from their pooled features (n, C)."""
        return features

    def compared(self, vectors: Tensor) -> Tensor:
        """What the loss sees, from the vectors of the whole batch (N, D)."""
        return vectors


class PooledFeaturesLoss(PooledLoss):
    """A metric loss on a fixed random projection of the pooled features, L2-normalised.

    HORDE's order 1, as wide and with as much weight as one of its orders with fixed projections: whatever such
    an order gains beyond this loss comes from products of features, not from a second loss past the embedding.

    Args:
        loss: As in `PooledLoss`, without parameters of its own for each width.
        in_channels: C, width of the pooled features.
        width: Width of the projection, whose entries are -1 or +1.
        **kwargs: As in `PooledLoss`.
    """

    def __init__(
        self, loss: nn.Module, in_channels: int, *, width: int = 1024, **kwargs: Any
    ) -> None:
        super().__init__(loss, **kwargs)
        self.register_buffer("projection", torch.randint(2, (in_channels, width)) * 2.0 - 1)

    def vectors(self, features: Tensor) -> Tensor:
        return F.normalize(features @ self.projection.to(features.dtype))


class FeatureCosinesLoss(PooledLoss):
    """A metric loss on the pooled features themselves.

    With `CosineSimilarity(power=k)` as the loss's distance, it is what HORDE's order k estimates on one position.

    Args:
        loss: As in `PooledLoss`; a loss with proxies needs some as wide as the features: `FeatureProxyAnchorLoss`.
        centred: Subtract the mean of the batch first: features behind a ReLU are not negative, so that the cosines
            of different classes are far from 0.
        **kwargs: As in `PooledLoss`.
    """

    def __init__(self, loss: nn.Module, *, centred: bool = False, **kwargs: Any) -> None:
        super().__init__(loss, **kwargs)
        self.centred = centred

    def compared(self, vectors: Tensor) -> Tensor:
        return vectors - vectors.mean(dim=0) if self.centred else vectors


class LinearHeadLoss(PooledLoss):
    """A metric loss on embeddings of its own: one more linear layer on the pooled features, L2-normalised.

    Args:
        loss: As in `PooledLoss`.
        in_channels: C, width of the pooled features.
        embedding_size: Width of these embeddings.
        **kwargs: As in `PooledLoss`.
    """

    def __init__(
        self, loss: nn.Module, in_channels: int, embedding_size: int, **kwargs: Any
    ) -> None:
        super().__init__(loss, **kwargs)
        self.linear = nn.Linear(in_channels, embedding_size, bias=False)

    def vectors(self, features: Tensor) -> Tensor:
        return F.normalize(F.linear(features, self.linear.weight.to(features.dtype)))


class OnePositionHORDELoss(HORDELoss):
    """HORDE on one position, the pooled features: no distribution over positions is left to match.

    Args, Raises: As in `HORDELoss`.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C).
    """

    feature_names = ("pooled",)

    def order_embeddings(self, features: Any) -> list[Tensor]:
        return super().order_embeddings(features[:, None])


class FeatureProxyAnchorLoss(ProxyAnchorLoss):
    """Proxy-Anchor with proxies as wide as the pooled features, for `FeatureCosinesLoss`."""

    def __init__(self, num_classes: int, in_channels: int, **kwargs: Any) -> None:
        super().__init__(num_classes=num_classes, embedding_size=in_channels, **kwargs)


class FeatureCosFaceLoss(CosFaceLoss):
    """AM-softmax with class weights as wide as the pooled features, for `FeatureCosinesLoss`.

    Margin and scale are those of `JRDLoss`, so that they may be left out beside its AM-softmax.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        *,
        margin: float = 0.1,
        scale: float = 20.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            embedding_size=in_channels,
            margin=margin,
            scale=scale,
            **kwargs,
        )
