import torch

from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.losses.base_metric_loss_function import (
    BaseMetricLossFunction,
)


class VarianceEstimationLoss(BaseMetricLossFunction):
    """Implementation of the variance loss of
    Second-Order Estimation Based Attention Network for Metric Learning
    """

    def __init__(self, unbiased=False, **kwargs):
        if "distance" in kwargs:
            raise ValueError("VarianceEstimationLoss cannot use a distance function")
        super().__init__(**kwargs)
        self.unbiased = unbiased
        self.add_to_recordable_attributes(list_of_names=["unbiased"], is_stat=False)
        self.add_to_recordable_attributes(
            list_of_names=["batch_variance", "predicted_variance", "gate_range"],
            is_stat=True,
        )

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.indices_tuple_not_supported(indices_tuple)
        c_f.labels_not_supported(labels, ref_labels)
        features, rows = embeddings, ref_emb
        if rows is features or rows.shape[1:] != features.shape[1:]:
            raise ValueError(
                "ref_emb must be the predicted variance, of shape (1, num_features)"
            )
        if len(features) == 0:
            # This has a gradient of 0 for the prediction too
            return {
                "loss": {
                    "losses": torch.sum(features) + torch.sum(rows) * 0,
                    "indices": None,
                    "reduction_type": "already_reduced",
                }
            }
        # The rows are equal: each sample gets its share of the gradient.
        predicted = rows.mean(dim=0)
        # Not `var`, which reads the rows of a matrix one number at a time, nor a matrix product, which autocast rounds.
        centred = features - features.mean(dim=0)
        divisor = max(len(features) - int(self.unbiased), 1)
        variance = (centred * centred).sum(dim=0) / divisor
        losses = (variance - predicted) ** 2  # eq. 3
        if self.collect_stats:
            predicted = predicted.detach()
            gate = torch.sigmoid(predicted)
            self.batch_variance = (
                features.detach().var(dim=0, unbiased=False).mean().item()
            )
            self.predicted_variance = predicted.mean().item()
            self.gate_range = (gate.max() - gate.min()).item()
        return {
            "loss": {
                "losses": losses,
                "indices": c_f.torch_arange_from_size(losses),
                "reduction_type": "element",
                "divisor": len(losses),
            }
        }

    def get_default_distance(self):
        """Return None: nothing uses it."""
