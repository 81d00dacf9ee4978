"""Regularizers that see labels, called like any loss of pytorch-metric-learning."""

from typing import Any

from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor

from .features import FeatureLoss


class LabelAwareRegularizer(FeatureLoss, BaseRegularizer):
    """Base of the regularizers that compare classes, so that they need the labels.

    They are added to a metric loss with `MultipleLosses([loss, regularizer], weights=[1, w])`. The slot
    `embedding_regularizer=` of a PML loss passes embeddings alone, and is refused.

    Raises:
        ValueError: if called without labels, or with a reference set.
    """

    def forward(
        self, embeddings: Tensor, labels: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if labels is None:
            raise ValueError(
                f"labels: {type(self).__name__} compares classes, and the slot embedding_regularizer= passes "
                "none; add it to the loss instead: MultipleLosses([loss, regularizer], weights=[1, w])"
            )
        return super().forward(embeddings, labels, *args, **kwargs)
