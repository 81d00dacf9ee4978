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

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import MeanReducer, SumReducer
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor

from ..distributed import gather_rows
from ..features.feature_loss import LabelAwareRegularizer, already_reduced
from ..functional.checks import one_of
from ..functional.precision import in_float64

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
    return _squared_energies(x, _class_average(classes, num_classes))


Average = Callable[[Tensor], Tensor]
"""Class means of values (N, ...) of images."""


def _class_average(classes: Tensor, num_classes: int) -> Average:
    """Means (C, ...); 0 for a class without images."""

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(num_classes, *values.shape[1:]).index_add(
            0, classes.to(values.device), values
        )

    # Older MPS backends add no int64.
    counts = sums(torch.ones_like(classes, dtype=torch.int32)).clamp(min=1)

    def average(values: Tensor) -> Tensor:
        return sums(values) / counts.to(values.device).view(-1, *[1] * (values.ndim - 1))

    return average


def _squared_energies(x: Tensor, average: Average) -> Tensor:
    """Eq. 3 of squared Euclidean distances, by the rows of the average."""
    if x.dtype == torch.float64 or _waits(x):  # values are not to be looked at
        energies, _ = _closed_form(in_float64(x), average)
    else:
        energies, terms = _closed_form(x, average)
        # Of classes so close float32 would leave too few digits of their energy.
        if (16 * energies < terms).fill_diagonal_(False).any():
            energies, _ = _closed_form(in_float64(x), average)
    return energies.clamp(min=0).to(x)


def _closed_form(x: Tensor, average: Average) -> tuple[Tensor, Tensor]:
    """Eq. 3, and the terms q_I + q_J that it subtracts from."""
    x = x - x.detach().mean(dim=0)  # a common offset would drown the distances
    mu, q = average(x), average((x * x).sum(dim=1))
    terms = q.unsqueeze(1) + q
    return torch.addmm(terms, mu, mu.t(), alpha=-2), terms  # eq. 3


def _waits(x: Tensor) -> bool:
    """True where Python cannot look at values, in compiled code, or would have to wait for them, on a GPU."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def _off_diagonal(x: Tensor) -> Tensor:
    """The entries of a (C, C) matrix that are not on its diagonal, row by row: (C * (C - 1),)."""
    C = len(x)
    return x.flatten()[1:].view(C - 1, C + 1)[:, :-1].flatten()


class EnergyConfusionRegularizer(LabelAwareRegularizer):
    """Regularizer that keeps a metric loss from being too sure of the training classes, by pulling them together.

    By default the value is a mean, at most log 5 on the unit sphere. The paper's lambdas (triplet 0.02, N-pair 0.3,
    binomial 0.13; a tenth of that on SOP and In-Shop) multiply a *sum over ordered pairs*, beside metric losses
    that are *sums over the batch* (eqs. 8 to 10): use them with `reducer=SumReducer()` here and in the base losses,
    never beside a mean-reduced loss.

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
        stats = self.collect_stats or self.reducer.collect_stats
        if _waits(x) and type(self.reducer) in (MeanReducer, SumReducer) and not stats:
            return {"loss": already_reduced(self._reduced(x, labels))}
        names, classes = torch.unique(labels, return_inverse=True)
        C = len(names)
        if C < 2:
            return {"loss": already_reduced((x * 0).sum())}
        energies = self._energies(x, _class_average(classes, C))
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

    def _energies(self, x: Tensor, average: Average) -> Tensor:
        """Mean distances between all classes, eq. 3, by the rows of the average."""
        distance = self.distance
        if type(distance) is LpDistance and distance.p == 2 and distance.power == 2:
            normalized = distance.maybe_normalize(x)
            distance.set_default_stats(x, x, normalized, normalized)
            return _squared_energies(normalized, average)
        return average(average(distance(x)).t()).t()

    def _terms(self, energies: Tensor) -> Tensor:
        return torch.log1p(energies) if self.log else energies  # eq. 11, or eq. 7

    def _reduced(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean or sum over pairs of classes I and J as one over pairs of images, with weights 1 / (N_I N_J).

        No shape depends on the labels, and no class is searched for.
        """
        same = labels.unsqueeze(1) == labels
        # In float64, where TF32 cannot round the products.
        p = 1 / in_float64(same.sum(dim=1))
        same = same.to(p.device)
        A = same * p  # row i averages over i's class
        energies = self._energies(x, lambda values: (A @ values.to(A)).to(values))
        weights = (p.unsqueeze(1) * p).masked_fill(same, 0).to(x)
        total = (weights * self._terms(energies)).sum()
        C = p.sum().round().to(x)
        return total / (C * (C - 1)).clamp(min=1) if type(self.reducer) is MeanReducer else total

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
