import torch

from ..utils import common_functions as c_f
from .base_metric_loss_function import BaseMetricLossFunction


class VarianceEstimationLoss(BaseMetricLossFunction):
    """
    Implementation of the variance loss of
    Second-Order Estimation Based Attention Network for Metric Learning
    """

    def __init__(self, unbiased=False, **kwargs):
        if "distance" in kwargs:
            raise ValueError("VarianceEstimationLoss cannot use a distance function")
        super().__init__(**kwargs)
        self.unbiased = unbiased
        self.add_to_recordable_attributes(name="unbiased", is_stat=False)
        self.add_to_recordable_attributes(
            list_of_names=["avg_variance", "avg_predicted_variance"], is_stat=True
        )

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.indices_tuple_not_supported(indices_tuple)
        c_f.labels_not_supported(labels, ref_labels)
        if ref_emb is embeddings or ref_emb.shape[1:] != embeddings.shape[1:]:
            raise ValueError(
                "ref_emb must be the predicted variance, of shape (1, num_features)"
            )

        n = len(embeddings)
        if n == 0:
            return self.zero_losses()

        # All rows are the same prediction, and each gets its share of the gradient
        predicted_variance = torch.mean(ref_emb, dim=0)
        deviations = embeddings - torch.mean(embeddings, dim=0)
        variance = torch.mean(deviations**2, dim=0)
        if self.unbiased and n > 1:
            variance = variance * (n / (n - 1))
        self.set_stats(variance, predicted_variance)
        losses = (variance - predicted_variance) ** 2  # Equation 3 in the paper
        return {
            "loss": {
                "losses": losses,
                "indices": c_f.torch_arange_from_size(losses),
                "reduction_type": "element",
            }
        }

    def set_stats(self, variance, predicted_variance):
        if self.collect_stats:
            with torch.no_grad():
                self.avg_variance = torch.mean(variance).item()
                self.avg_predicted_variance = torch.mean(predicted_variance).item()
