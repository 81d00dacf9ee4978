"""Controls: losses that do a part of what a method does, to see which part helps.

HORDE's orders 2 and 3 with sketches are metric losses on estimates of <mean_p x_p^(k), mean_q y_q^(k)>, the inner
products of an image's k-th moments over its positions. From there to the base loss, each control leaves one more
thing out:

| control | positions | sketches | power of the cosine |
|---|---|---|---|
| `HORDELoss` | yes | yes | k |
| `OnePositionHORDELoss` | no: the pooled features alone | yes | k |
| `FeatureCosinesLoss`, with a distance of power k | no | no: <x, y>^k exactly | k |
| `FeatureCosinesLoss`, `ProjectedFeaturesLoss` | no | no, or one of order 1 | 1 |
| `LinearHeadLoss` | no | no: a trained layer | 1 |

All but HORDE are the library's `PooledFeaturesLoss` with `powers=(1,)`: a loss of the features as they are, centred
or projected. The power is that of PML's own distances, `CosineSimilarity(power=2)`, as the studies had it before
`PooledFeaturesLoss` took powers.
"""

from typing import Any

import torch
from pytorch_metric_learning.losses import CosFaceLoss, ProxyAnchorLoss
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import HORDELoss, PooledFeaturesLoss


class FeatureCosinesLoss(PooledFeaturesLoss):
    """A metric loss on the pooled features themselves.

    With `CosineSimilarity(power=k)` as the loss's distance, it is what HORDE's order k estimates on one position.

    Args:
        loss: Any PML loss; one with proxies needs some as wide as the features: `FeatureProxyAnchorLoss`.
        centred: Subtract the mean of the batch first: features behind a ReLU are not negative, so that the cosines
            of different classes are far from 0.
        **kwargs: As in any PML loss, except `reducer` and `distance`, which belong to `loss`.
    """

    def __init__(self, loss: nn.Module, *, centred: bool = False, **kwargs: Any) -> None:
        super().__init__(loss, powers=(1,), power_weights=1.0, **kwargs)
        self.centred = centred

    def sub_loss(self, name: str, vectors: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.centred:
            vectors = vectors - vectors.mean(dim=0)
        return super().sub_loss(name, vectors, *args, **kwargs)


class ProjectedFeaturesLoss(PooledFeaturesLoss):
    """A metric loss on a fixed random projection of the pooled features, L2-normalised.

    HORDE's order 1, as wide and with as much weight as one of its orders with fixed projections: whatever such
    an order gains beyond this loss comes from products of features, not from a second loss past the embedding.

    Args:
        loss: As in `FeatureCosinesLoss`.
        in_channels: C, width of the pooled features.
        width: Width of the projection, whose entries are -1 or +1.
        **kwargs: As in `FeatureCosinesLoss`.
    """

    def __init__(
        self, loss: nn.Module, in_channels: int, *, width: int = 1024, **kwargs: Any
    ) -> None:
        super().__init__(loss, powers=(1,), power_weights=1.0, **kwargs)
        self.register_buffer("projection", torch.randint(2, (in_channels, width)) * 2.0 - 1)

    def sub_loss(self, name: str, vectors: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        projected = F.normalize(vectors @ self.projection.to(vectors.dtype))
        return super().sub_loss(name, projected, *args, **kwargs)


class LinearHeadLoss(PooledFeaturesLoss):
    """A metric loss on embeddings of its own: one more linear layer on the pooled features, L2-normalised.

    Args:
        loss: As in `FeatureCosinesLoss`.
        in_channels: C, width of the pooled features.
        embedding_size: Width of these embeddings.
        **kwargs: As in `FeatureCosinesLoss`.
    """

    def __init__(
        self, loss: nn.Module, in_channels: int, embedding_size: int, **kwargs: Any
    ) -> None:
        super().__init__(loss, powers=(1,), power_weights=1.0, **kwargs)
        self.linear = nn.Linear(in_channels, embedding_size, bias=False)

    def sub_loss(self, name: str, vectors: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self.linear.weight.to(vectors.dtype)
        return super().sub_loss(name, F.normalize(F.linear(vectors, weight)), *args, **kwargs)


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
