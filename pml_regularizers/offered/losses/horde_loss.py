import copy

import torch
import torch.nn.functional as F

from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.losses.base_metric_loss_function import (
    BaseMetricLossFunction,
)


class HORDELoss(BaseMetricLossFunction):
    """
    Implementation of https://arxiv.org/abs/1908.02735
    """

    def __init__(
        self,
        loss,
        in_channels,
        embedding_size,
        order=5,
        moment_dim=8192,
        train_projections=True,
        **kwargs,
    ):
        for name in ["distance", "reducer"]:
            if name in kwargs:
                raise ValueError(
                    "HORDELoss cannot use a {0}. Use it in the inner loss".format(name)
                )
        if order < 2:
            raise ValueError("order must be at least 2")
        self.order = order  # needed to know the sub-loss names
        super().__init__(**kwargs)
        # A loss can have parameters or a memory, so each higher order has its own copy
        self.losses = torch.nn.ModuleList(
            [loss] + [copy.deepcopy(loss) for _ in range(order - 1)]
        )
        self.projections = torch.nn.ParameterList(
            [
                torch.nn.Parameter(
                    torch.Tensor(in_channels, moment_dim),
                    requires_grad=train_projections,
                )
                for _ in range(order)
            ]
        )
        self.embedders = torch.nn.ModuleList(
            [
                (
                    torch.nn.Linear(moment_dim, embedding_size, bias=False)
                    if train_projections
                    else torch.nn.Identity()
                )
                for _ in range(order - 1)
            ]
        )
        for parameters in [self.projections, self.embedders.parameters()]:
            for weight in parameters:
                torch.nn.init.xavier_uniform_(weight)
                if not train_projections:
                    weight.sign_()  # Algorithm 1 in the paper
        self.features = None
        self.in_channels = in_channels
        self.embedding_size = embedding_size
        self.moment_dim = moment_dim
        self.add_to_recordable_attributes(
            list_of_names=["order", "in_channels", "embedding_size", "moment_dim"],
            is_stat=False,
        )

    def forward(
        self,
        embeddings,
        labels=None,
        indices_tuple=None,
        ref_emb=None,
        ref_labels=None,
        features=None,
    ):
        """
        Args:
            features: tensor of size (batch_size, in_channels, height, width) or
                        (batch_size, length, in_channels)
            See BaseMetricLossFunction for the other arguments
        Returns: the loss
        """
        if features is None:
            raise ValueError("features are required for this loss function")
        if len(features) != len(embeddings):
            raise ValueError("Number of features must equal number of embeddings")
        if features.ndim not in [3, 4]:
            raise ValueError("features must be the 3D or 4D features before pooling")
        self.features = features
        try:
            return super().forward(
                embeddings, labels, indices_tuple, ref_emb, ref_labels
            )
        finally:
            self.features = None

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        orders = [embeddings] + self.get_high_order_embeddings(self.features)
        return {
            name: {
                "losses": loss_func(x, labels, indices_tuple),
                "indices": None,
                "reduction_type": "already_reduced",
            }
            for name, loss_func, x in zip(self._sub_loss_names(), self.losses, orders)
        }

    def get_high_order_embeddings(self, features):
        """
        Returns: a list of tensors of size (batch_size, embedding_size), or of size
                    (batch_size, moment_dim) if the projections are not trained,
                    for the orders 2, 3, ..., self.order
        """
        x = features.type(self.projections[0].dtype)
        if x.ndim == 4:
            x = x.permute(0, 2, 3, 1).flatten(1, 2)
        # The normalization below cancels any factor. With this one, the products of
        # large or small features neither overflow nor vanish, nor do the squares here.
        square = torch.mean(x.detach().float() ** 2, dim=(1, 2), keepdim=True)
        x = x / torch.clamp(torch.sqrt(square), min=1e-7).type(x.dtype)

        output = []
        product = torch.matmul(x, self.projections[0])
        for i, embedder in enumerate(self.embedders):
            # Equation 6 in the paper
            product = product * torch.matmul(x, self.projections[i + 1])
            # Equation 8 in the paper: the products are averaged, not the features
            moment = torch.mean(product, dim=1)
            output.append(F.normalize(embedder(moment)))
        return output

    def _sub_loss_names(self):
        return ["order_{}".format(i + 1) for i in range(self.order)]
