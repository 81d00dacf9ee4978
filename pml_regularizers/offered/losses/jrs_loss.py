import torch

from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from pytorch_metric_learning.losses.base_metric_loss_function import (
    BaseMetricLossFunction,
)


def mean_distance(mat):
    """
    The mean of a distance matrix over all pairs of different embeddings, without a
    gradient. It is 1 if all are the same.
    """
    n = len(mat)
    # The sum would be too large for float16.
    mean = torch.mean(mat.detach()) * (n / max(n - 1, 1))
    return torch.where(mean == 0, torch.ones_like(mean), mean)


def gaussian_mixture(mat, num_kernels, bandwidth):
    """
    The mean of num_kernels Gaussian kernels of a matrix of squared distances, whose
    bandwidths double. The one in the middle is the given bandwidth.
    """
    widest = bandwidth * 2.0 ** (num_kernels - 1 - num_kernels // 2)
    kernel = output = torch.exp(mat / -widest)
    for _ in range(num_kernels - 1):
        kernel = kernel * kernel  # has half the bandwidth
        output = output + kernel
    return output / num_kernels


class JRSLoss(BaseMetricLossFunction):
    """
    Implementation of joint representation similarity (JRS):
    https://proceedings.mlr.press/v119/chu20a.html
    """

    features = ()

    def __init__(self, num_kernels=3, **kwargs):
        super().__init__(**kwargs)
        assert not self.distance.is_inverted
        self.num_kernels = num_kernels

    def forward(
        self,
        embeddings,
        labels=None,
        indices_tuple=None,
        ref_emb=None,
        ref_labels=None,
        features=(),
    ):
        """
        Args:
            features: list of tensors, each of size (batch_size, any size), which are
                        the representations that are compared besides the embeddings
            See BaseMetricLossFunction for the other arguments
        Returns: the loss
        """
        if not c_f.is_list_or_tuple(features):
            raise ValueError("features must be a list of tensors")
        for x in features:
            if len(x) != len(embeddings):
                raise ValueError("Number of features must equal number of embeddings")
        self.features = features
        try:
            return super().forward(
                embeddings, labels, indices_tuple, ref_emb, ref_labels
            )
        finally:
            self.features = ()

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.labels_or_indices_tuple_required(labels, indices_tuple)
        c_f.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        kernel = self.joint_kernel(embeddings)
        return {"loss": self.negative_pairs(kernel, labels, indices_tuple)}

    def joint_kernel(self, embeddings):
        """The product of the kernels of all representations: (batch_size, batch_size)"""
        distance = LpDistance(power=2, normalize_embeddings=False)
        mats = [self.distance(embeddings)] + [distance(x) for x in self.features]
        joint_kernel = 1
        for mat, num_kernels in zip(mats, self.get_num_kernels(len(mats))):
            kernel = gaussian_mixture(mat, num_kernels, mean_distance(mat))
            joint_kernel = joint_kernel * kernel
        return joint_kernel

    @staticmethod
    def negative_pairs(kernel, labels, indices_tuple):
        """The kernel of all pairs of different classes, or of those in indices_tuple"""
        if indices_tuple is None:
            is_negative = labels.unsqueeze(1) != labels
            a, n = torch.where(is_negative)
            losses = torch.masked_select(kernel, is_negative)
        else:
            _, _, a, n = lmu.convert_to_pairs(indices_tuple, labels)
            losses = kernel[a, n]
        if len(a) == 0:
            # This has a gradient of 0 for the features too
            return {
                "losses": torch.sum(losses),
                "indices": None,
                "reduction_type": "already_reduced",
            }
        return {
            "losses": losses,
            "indices": (a, n),
            "reduction_type": "neg_pair",
            "divisor": len(a),
        }

    def get_num_kernels(self, num_representations):
        if not c_f.is_list_or_tuple(self.num_kernels):
            return [self.num_kernels] * num_representations
        if len(self.num_kernels) != num_representations:
            raise ValueError(
                "num_kernels must have a number for the embeddings and for each of the features"
            )
        return self.num_kernels

    def get_default_distance(self):
        return LpDistance(p=2, power=2)
