import torch

from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.losses.base_metric_loss_function import (
    BaseMetricLossFunction,
)


def energy_confusion(x, classes, num_classes):
    """
    The mean squared Euclidean distance between the rows of each pair of classes, which
    is equation 3 in the paper. The diagonal has the mean distances within the classes,
    where each row counts as its own neighbor too.
    Args:
        x: tensor of size (N, embedding_size)
        classes: tensor of size (N), the class of each row: 0, 1, ..., num_classes - 1
    Returns: tensor of size (num_classes, num_classes). Classes without rows have no
                meaning in it

    >>> x = torch.tensor([[0.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
    >>> energy_confusion(x, torch.tensor([0, 0, 1]), num_classes=2)
    tensor([[ 2., 10.],
            [10.,  0.]])
    """
    return _squared_energies(x, _class_average(classes, num_classes))


def _class_average(classes, num_classes):
    """Means (C, ...); 0 for a class without images."""

    def sums(values):
        return values.new_zeros(num_classes, *values.shape[1:]).index_add(
            0, classes.to(values.device), values
        )

    # Older MPS backends add no int64.
    counts = sums(torch.ones_like(classes, dtype=torch.int32)).clamp(min=1)

    def average(values):
        shape = (-1,) + (1,) * (values.ndim - 1)
        return sums(values) / counts.to(values.device).view(shape)

    return average


def _squared_energies(x, average):
    """Eq. 3 of squared Euclidean distances, by the rows of the average."""
    energies, terms = _closed_form(x, average)
    # Of classes so close float32 would leave too few digits of their energy.
    close = (16 * energies < terms).fill_diagonal_(False)
    if x.dtype != torch.float64 and close.any():
        device = "cpu" if x.device.type == "mps" else x.device  # mps has no float64
        energies, _ = _closed_form(x.to(device, torch.float64), average)
    return energies.clamp(min=0).to(x)


def _closed_form(x, average):
    """Eq. 3, and the terms q_I + q_J that it subtracts from."""
    x = x - x.detach().mean(dim=0)  # a common offset would drown the distances
    mu, q = average(x), average((x * x).sum(dim=1))
    terms = q.unsqueeze(1) + q
    return torch.addmm(terms, mu, mu.t(), alpha=-2), terms  # eq. 3


def _off_diagonal(x):
    """The entries of a (C, C) matrix that are not on its diagonal, row by row: (C * (C - 1),)."""
    C = len(x)
    return x.flatten()[1:].view(C - 1, C + 1)[:, :-1].flatten()


class EnergyConfusionLoss(BaseMetricLossFunction):
    """Implementation of the energy confusion term of https://arxiv.org/abs/1901.07169"""

    def __init__(self, log=True, **kwargs):
        super().__init__(**kwargs)
        if getattr(self.distance, "is_inverted", True):
            raise ValueError(
                "distance: expected one that grows with distance, such as LpDistance(power=2), "
                f"got {type(self.distance).__name__}"
            )
        self.log = log
        self.add_to_recordable_attributes(name="log", is_stat=False)
        self.add_to_recordable_attributes(name="between_class_energy", is_stat=True)

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        c_f.labels_required(labels)
        c_f.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        c_f.indices_tuple_not_supported(indices_tuple)
        names, classes = torch.unique(labels, return_inverse=True)
        C = len(names)
        if C < 2:
            return self.zero_losses()
        energies = self._energies(embeddings, _class_average(classes, C))
        if self.collect_stats:
            self.between_class_energy = _off_diagonal(energies.detach()).mean().item()
        members = classes.new_empty(C).scatter_(
            0, classes, c_f.torch_arange_from_size(embeddings)
        )
        members = members.expand(C, C)  # an image of each class
        return {
            "loss": {
                "losses": _off_diagonal(self._terms(energies)),
                "indices": (_off_diagonal(members.t()), _off_diagonal(members)),
                "reduction_type": "neg_pair",
                "divisor": C * (C - 1),
            }
        }

    def get_default_distance(self):
        return LpDistance(p=2, power=2)

    def _energies(self, x, average):
        """Mean distances between all classes, eq. 3, by the rows of the average."""
        distance = self.distance
        if type(distance) is LpDistance and distance.p == 2 and distance.power == 2:
            normalized = distance.maybe_normalize(x)
            distance.set_default_stats(x, x, normalized, normalized)
            return _squared_energies(normalized, average)
        return average(average(distance(x)).t()).t()

    def _terms(self, energies):
        return torch.log1p(energies) if self.log else energies  # eq. 11, or eq. 7
