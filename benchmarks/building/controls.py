"""Controls: losses that do a part of what a method does, to see which part helps."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers._loss_copies import WrapperLoss
from pml_regularizers.distributed import gather_features
from pml_regularizers.feature_loss import already_reduced


class PooledFeaturesLoss(WrapperLoss):
    """A metric loss on a fixed random projection of the pooled features, L2-normalised.

    HORDE's order 1, as wide and with as much weight as one of its orders with fixed projections: whatever such
    an order gains beyond this loss comes from products of features, not from a second loss past the embedding.

    Args:
        loss: Any PML loss without parameters of its own for each width; deep-copied.
        in_channels: C, width of the pooled features.
        width: Width of the projection, whose entries are -1 or +1.
        **kwargs: As in any PML loss, except `reducer` and `distance`, which belong to `loss`.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C).
    """

    feature_names = ("pooled",)

    def __init__(
        self, loss: nn.Module, in_channels: int, *, width: int = 1024, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.check_wrapped("loss", loss)
        self.hold({"pooled": loss})
        self.register_buffer("projection", torch.randint(2, (in_channels, width)) * 2.0 - 1)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, dict[str, Any]]:
        projected = F.normalize(self.features @ self.projection.to(self.features.dtype))
        (gathered,) = gather_features([projected], embeddings)
        return {"loss": already_reduced(self.part("pooled", gathered, labels, indices_tuple))}
