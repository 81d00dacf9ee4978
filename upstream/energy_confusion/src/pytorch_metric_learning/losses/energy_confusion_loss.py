import torch

from ..distances import LpDistance
from ..utils import common_functions as c_f
from ..utils import loss_and_miner_utils as lmu
from .base_metric_loss_function import BaseMetricLossFunction


class EnergyConfusionLoss(BaseMetricLossFunction):
    """
    Implementation of the energy confusion term of https://arxiv.org/abs/1901.07169
    """

    def __init__(self, log=True, **kwargs):
        super().__init__(**kwargs)
        assert not self.distance.is_inverted
        self.log = log
        self.add_to_recordable_attributes(name="log", is_stat=False)

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.labels_required(labels)
        c_f.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        c_f.indices_tuple_not_supported(indices_tuple)

        classes = torch.unique(labels)
        if len(classes) < 2:
            return self.zero_losses()

        mat = self.distance(embeddings)
        is_member = (classes.unsqueeze(1) == labels.unsqueeze(0)).type(mat.dtype)
        average = is_member / torch.sum(is_member, dim=1, keepdim=True)
        # The mean distance between the embeddings of 2 classes.
        # Equation 3 in the paper
        energy = torch.matmul(torch.matmul(average, mat), average.t())

        _, _, class1, class2 = lmu.get_all_pairs_indices(classes)
        losses = energy[class1, class2]
        if self.log:
            losses = torch.log1p(losses)  # Equation 11 in the paper

        # reducers get an embedding of each class
        members = torch.argmax(is_member, dim=1)
        return {
            "loss": {
                "losses": losses,
                "indices": (members[class1], members[class2]),
                "reduction_type": "neg_pair",
            }
        }

    def get_default_distance(self):
        return LpDistance(p=2, power=2)
