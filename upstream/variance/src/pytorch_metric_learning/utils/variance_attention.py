import torch

from . import common_functions as c_f


class VarianceAttention(torch.nn.Module):
    """
    Implementation of the variance estimation module (VEM) of
    Second-Order Estimation Based Attention Network for Metric Learning
    """

    def __init__(self, num_features, weight_init_func=None):
        super().__init__()
        if weight_init_func is None:
            weight_init_func = c_f.TorchInitWrapper(torch.nn.init.normal_)
        # 1 row, so that it is like a batch of features
        self.variance = torch.nn.Parameter(torch.Tensor(1, num_features))
        weight_init_func(self.variance)

    def forward(self, features):
        """
        features should have shape (N, num_features)
        """
        return features * torch.sigmoid(self.variance)  # Equation 5 in the paper
