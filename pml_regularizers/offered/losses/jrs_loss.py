import torch

from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from pytorch_metric_learning.losses.base_metric_loss_function import (
    BaseMetricLossFunction,
)


class JRSLoss(BaseMetricLossFunction):
    """
    Implementation of joint representation similarity (JRS):
    https://proceedings.mlr.press/v119/chu20a.html
    """

    def __init__(self, num_kernels=3, **kwargs):
        super().__init__(**kwargs)
        assert not self.distance.is_inverted
        # record-keeper cannot record a tuple
        self.num_kernels = (
            list(num_kernels) if c_f.is_list_or_tuple(num_kernels) else num_kernels
        )
        self.feature_distance = LpDistance(power=2, normalize_embeddings=False)
        self.features = []
        self.add_to_recordable_attributes(name="num_kernels", is_stat=False)

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
            self.features = []

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.labels_or_indices_tuple_required(labels, indices_tuple)
        c_f.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        _, _, a, n = lmu.convert_to_pairs(indices_tuple, labels)
        if len(a) == 0:
            return self.zero_losses()

        mats = [self.distance(embeddings)]
        mats += [self.feature_distance(x) for x in self.features]
        joint_kernel = 1
        for mat, num_kernels in zip(mats, self.get_num_kernels(len(mats))):
            joint_kernel = joint_kernel * self.gaussian_mixture(mat, num_kernels)
        return {
            "loss": {
                "losses": joint_kernel[a, n],
                "indices": (a, n),
                "reduction_type": "neg_pair",
            }
        }

    def gaussian_mixture(self, mat, num_kernels):
        # The mean over all pairs of different embeddings. The sum would be too large
        # for float16.
        n = len(mat)
        bandwidth = torch.mean(mat.detach()) * (n / (n - 1))
        if bandwidth == 0:
            bandwidth = torch.ones_like(bandwidth)
        mat = mat / bandwidth
        kernel = 0
        for k in range(num_kernels):
            kernel = kernel + torch.exp(-mat / 2.0 ** (k - num_kernels // 2))
        return kernel / num_kernels

    def get_num_kernels(self, num_representations):
        if not isinstance(self.num_kernels, list):
            return [self.num_kernels] * num_representations
        if len(self.num_kernels) != num_representations:
            raise ValueError(
                "num_kernels must have a number for the embeddings and for each of the features"
            )
        return self.num_kernels

    def get_default_distance(self):
        return LpDistance(p=2, power=2)
