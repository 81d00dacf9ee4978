r"""Energy confusion (Chen, Deng, "Energy Confused Adversarial Metric Learning", ECAML, AAAI 2019).

    L_ec(I, J) = mean over i in I, j in J of |x_i - x_j|^2              eq. 3
               = q_I + q_J - 2 <mu_I, mu_J>                             mu, q: class means of x and of |x|^2
               = |mu_I - mu_J|^2 + tr Cov_I + tr Cov_J
    L = L_m + lambda sum_{I != J} L_ec(I, J)                            eq. 7
    L = L_m + lambda sum_{I != J} log(1 + L_ec(I, J))                   eq. 11

The term pulls the classes of a batch together while the metric loss L_m pulls them apart: the network becomes
less sure of the features that separate the training classes, and keeps more of those that may separate others.
Both terms are minimised; nothing is "adversarial" beyond that. The second line of eq. 3 needs no pair of images:
the cost is linear in the batch, plus one matrix of classes.

Differs from the paper:
* The default is the mean over class pairs, whose scale does not depend on the number of classes. Eqs. 7 and 11
  sum over ordered pairs, so that each pair of classes counts twice: `reducer=SumReducer()`.
* All pairs of classes count; the paper's "randomly chosen in the current minibatch" does not say how many do.
* Unit-length embeddings by default, as in the paper's triplet and binomial losses (eqs. 8, 10). Its N-pair loss
  (eq. 9) has raw ones: give the regularizer a `distance` that treats the embeddings as the metric loss does.
"""

from typing import Any, Literal, get_args

import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import MeanReducer, SumReducer
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor
from torch.nn import functional as F

from ..distributed import gather_rows
from ..features.feature_loss import LabelAwareRegularizer, already_reduced
from ..functional.checks import one_of

Gradient = Literal["fc", "all"]


def energy_confusion(x: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Mean squared Euclidean distance between the images of each pair of classes: eq. 3.

    The diagonal holds the mean distances within the classes, each image's to itself included, so that L_IJ -
    (L_II + L_JJ) / 2 is half the energy distance of eq. 4, and the squared MMD of eq. 6.

    Args:
        x: (N, E), in float32 or float64.
        classes: (N,), the class of each row, 0 .. C-1: `torch.unique(labels, return_inverse=True)[1]`.
        num_classes: C. Rows and columns of a class without images have no meaning.

    Returns:
        (C, C), symmetric, at least 0, in x's dtype.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
        >>> energy_confusion(x, torch.tensor([0, 0, 1]), num_classes=2)
        tensor([[ 2., 10.],
                [10.,  0.]])
    """
    energies, terms = _closed_form(x, classes, num_classes)
    if x.dtype != torch.float64 and _cancels(energies, terms):
        energies, _ = _closed_form(x.double(), classes, num_classes)
    return energies.clamp(min=0).to(x.dtype)


def _closed_form(x: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Eq. 3, and the terms q_I + q_J that it subtracts from: (C, C), (C, C)."""
    x = x - x.detach().mean(dim=0)  # a common offset would drown the distances
    p = _probabilities(x, classes, num_classes)
    mu = p.unsqueeze(1) * _class_sums(x, classes, num_classes)  # (C, E)
    q = p * _class_sums((x * x).sum(dim=1), classes, num_classes)  # (C,)
    terms = q.unsqueeze(1) + q
    return torch.addmm(terms, mu, mu.t(), alpha=-2), terms  # eq. 3


def _cancels(energies: Tensor, terms: Tensor) -> bool:
    """True if two classes are so close that float32 would leave too few digits of their energy."""
    if energies.device.type == "mps":  # has no float64
        return False
    if torch.compiler.is_compiling():  # follows no values
        return True
    return bool((16 * energies < terms).fill_diagonal_(False).any())


def _probabilities(like: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """1 / N_I, the probability of each image of a class: (C,); 1 for a class without images."""
    return 1 / _class_sums(like.new_ones(len(classes)), classes, num_classes).clamp(min=1)


def _class_sums(values: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """(N, ...) -> (C, ...)."""
    return values.new_zeros(num_classes, *values.shape[1:]).index_add(0, classes, values)


def _off_diagonal(x: Tensor) -> Tensor:
    """The entries of a (C, C) matrix that are not on its diagonal, row by row: (C * (C - 1),)."""
    C = len(x)
    return x.flatten()[1:].view(C - 1, C + 1)[:, :-1].flatten()


class EnergyConfusionRegularizer(LabelAwareRegularizer):
    """Regularizer that keeps a metric loss from being too sure of the training classes, by pulling them together.

    By default the value is a mean, at most log 5 on the unit sphere: choose its weight in `MultipleLosses` as for
    any mean-reduced loss. The paper's lambdas (triplet 0.02, N-pair 0.3, binomial 0.13; a tenth of that on SOP and
    In-Shop) multiply a *sum over ordered pairs*, beside metric losses that are *sums over the batch* (eqs. 8 to
    10): use them with `reducer=SumReducer()` here and in the base losses, never beside a mean-reduced loss.

    Args:
        log: Take log(1 + L_ec) of each pair (eq. 11), or L_ec itself (eq. 7).
        gradient: "fc": the gradient reaches the linear layer of the embeddings only, as the paper evaluates it
            (section 4.2: "the overfitting mainly appears at the fc layer"); the regularizer then reads the
            `stopgrad_embeddings` of an `EmbeddingHead`, through `attach(head)` or `features=`. "all": it reads
            the embeddings that it is called with, and the whole network is regularised.
        **kwargs: `reducer`, `distance` (any of PML's except similarities; squared Euclidean in closed form, others
            from the N x N matrix), `collect_stats`, `embedding_regularizer`, `embedding_reg_weight`.

    Default distance: `LpDistance(p=2, power=2)`, of normalised embeddings. Default reducer: `MeanReducer()`.
    Reducer input: **loss**, for every ordered pair of classes, (I, J) and (J, I), by the indices of one image of
    each; reduction type "neg_pair".

    Shape:
        embeddings (N, E), labels (N,); features (N, E) where `gradient="fc"`. `indices_tuple` is ignored:
        the equation has no tuples. With only one class, or no image, the value is 0, with a working backward.

    Raises:
        ValueError: for an unknown `gradient`, for a similarity, or if embeddings and features are not matrices
            of one width.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> regularizer = EnergyConfusionRegularizer(gradient="all")
        >>> regularizer(torch.eye(4), torch.tensor([0, 0, 1, 1]))  # log(1 + 2)
        tensor(1.0986)
    """

    def __init__(self, *, log: bool = True, gradient: Gradient = "fc", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if getattr(self.distance, "is_inverted", True):
            raise ValueError(
                "distance: expected one of PML's that grow with distance, such as LpDistance(power=2), "
                f"got {type(self.distance).__name__}"
            )
        one_of("gradient", gradient, get_args(Gradient))
        self.gradient = gradient
        self.feature_names = ("stopgrad_embeddings",) if gradient == "fc" else ()
        self.log = log
        self.add_to_recordable_attributes(list_of_names=["gradient", "log"], is_stat=False)
        self.add_to_recordable_attributes(name="between_class_energy", is_stat=True)

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, *_: Any
    ) -> dict[str, dict[str, Any]]:
        self.distance.check_shapes(embeddings, None)
        x = embeddings if self.gradient == "all" else self._own_embeddings(embeddings)
        if torch.compiler.is_compiling() and type(self.reducer) in (MeanReducer, SumReducer):
            return {"loss": already_reduced(self._in_one_graph(x, labels))}
        names, classes = torch.unique(labels, return_inverse=True)
        C = len(names)
        if C < 2:
            return {"loss": already_reduced((x * 0).sum())}
        energies = self._energies(x, classes, C)
        if self.collect_stats:
            self.between_class_energy = _off_diagonal(energies.detach()).mean().item()
        members = classes.new_empty(C).scatter_(0, classes, c_f.torch_arange_from_size(x))
        members = members.expand(C, C)  # an image of each class
        return {
            "loss": {
                "losses": _off_diagonal(self._terms(energies)),
                "indices": (_off_diagonal(members.t()), _off_diagonal(members)),
                "reduction_type": "neg_pair",
                "divisor": C * (C - 1),
            }
        }

    def get_default_distance(self) -> LpDistance:
        return LpDistance(p=2, power=2)

    def _energies(self, x: Tensor, classes: Tensor, num_classes: int) -> Tensor:
        """Mean distances between all classes: (C, C)."""
        distance = self.distance
        if type(distance) is LpDistance and distance.p == 2 and distance.power == 2:
            normalized = distance.maybe_normalize(x)
            distance.set_default_stats(x, x, normalized, normalized)
            return energy_confusion(normalized, classes, num_classes)
        distances = distance(x)
        p = _probabilities(distances, classes, num_classes)
        rows = _class_sums(distances, classes, num_classes)
        return p.unsqueeze(1) * p * _class_sums(rows.t(), classes, num_classes).t()  # eq. 3

    def _terms(self, energies: Tensor) -> Tensor:
        return torch.log1p(energies) if self.log else energies  # eq. 11, or eq. 7

    def _in_one_graph(self, x: Tensor, labels: Tensor) -> Tensor:
        """The reduced value, with room for N classes: compiled code needs one shape for all batches of a size."""
        labels, order = labels.sort()  # `unique` has no fixed shape
        ranks = F.pad((labels[1:] != labels[:-1]).cumsum(dim=0), (1, 0))
        classes = torch.empty_like(order).scatter(0, order, ranks)
        index = torch.arange(len(labels), device=x.device)
        exists = index <= ranks[-1]
        pairs = exists.unsqueeze(1) & exists & (index.unsqueeze(1) != index)
        total = (self._terms(self._energies(x, classes, len(labels))) * pairs).sum()
        return total / pairs.sum().clamp(min=1) if type(self.reducer) is MeanReducer else total

    def _own_embeddings(self, embeddings: Tensor) -> Tensor:
        """Embeddings of the whole batch whose gradient ends at the linear layer."""
        x = self.features
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != embeddings.shape[1]:
            came = tuple(x.shape) if isinstance(x, Tensor) else f"{len(x)} tensors"
            raise ValueError(
                f'features: gradient="fc" reads embeddings (n, {embeddings.shape[1]}) with a gradient to the '
                f"linear layer only, got shape {came}; attach to an EmbeddingHead or its stopgrad_embeddings, "
                "or pass features=fc(pooled.detach())"
            )
        return gather_rows(x, embeddings)
