r"""Energy confusion (Chen, Deng, "Energy Confused Adversarial Metric Learning", ECAML, AAAI 2019).

    L_ec(I, J) = mean over i in I, j in J of |x_i - x_j|^2              eq. 3
               = q_I + q_J - 2 <mu_I, mu_J>                             mu, q: class means of x and of |x|^2
               = |mu_I - mu_J|^2 + tr Cov_I + tr Cov_J
    L = L_m + lambda sum_{I != J} L_ec(I, J)                            eq. 7
    L = L_m + lambda sum_{I != J} log(1 + L_ec(I, J))                   eq. 11

The term pulls the classes of a batch together, and the images of each class, while the metric loss L_m
pulls the classes apart: the network becomes less sure of the features that separate the training classes, and
keeps more of those that may separate other classes. Both terms are minimised; nothing is "adversarial" beyond
that.

The second line of eq. 3 needs no pair of images: the cost is linear in the batch, plus one matrix of classes.

Differs from the paper:
* The default is the mean over class pairs, whose scale does not depend on the number of classes. Eqs. 7 and 11
  sum over ordered pairs, so that each pair of classes counts twice: `reduction="ordered_sum"`.
* All pairs of classes count by default; the paper's "randomly chosen in the current minibatch" does not say
  how many are: `num_pairs`.
* Unit-length embeddings by default. The paper assumes them for the triplet loss (eq. 8) and uses cosines in
  the binomial (eq. 10), but inner products of raw embeddings in N-pair (eq. 9): give the regularizer a `distance`
  that treats the embeddings as the metric loss does.
"""

from typing import Any, Literal, get_args

import torch
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import Tensor
from torch.nn import functional as F

from ._precision import CheckedIntegers
from .distributed import gather_rows
from .feature_loss import LabelAwareRegularizer, already_reduced

Reduction = Literal["mean", "ordered_sum"]
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
    dtype = x.dtype
    # The terms below cancel if classes are close: hence float64 (which MPS lacks), and distances from the mean
    # of the batch, so that the terms are no larger than the distances.
    if x.device.type != "mps":
        x = x.double()
    x = x - x.detach().mean(dim=0)
    p = _probabilities(x, classes, num_classes)
    mu = p.unsqueeze(1) * _class_sums(x, classes, num_classes)  # (C, E)
    q = p * _class_sums(torch.linalg.vecdot(x, x), classes, num_classes)  # (C,)
    energies = q.unsqueeze(1) + q - 2 * mu @ mu.T  # eq. 3
    return energies.clamp(min=0).to(dtype)


def _mean_distances(distances: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Eq. 3 with another distance: (N, N) between images -> (C, C) means between classes."""
    p = _probabilities(distances, classes, num_classes)
    rows = _class_sums(distances, classes, num_classes)
    return p.unsqueeze(1) * p * _class_sums(rows.T, classes, num_classes).T  # eq. 3


def _probabilities(like: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """1 / N_I, the probability of each image of a class: (C,); 1 for a class without images."""
    sizes = _class_sums(like.new_ones(len(classes)), classes, num_classes)
    return 1 / sizes.clamp(min=1)


def _class_sums(values: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """(N, ...) -> (C, ...)."""
    return values.new_zeros(num_classes, *values.shape[1:]).index_add(0, classes, values)


class EnergyConfusionRegularizer(CheckedIntegers, LabelAwareRegularizer):
    """Regularizer that keeps a metric loss from being too sure of the training classes, by pulling them together.

    Add it to a metric loss and choose its weight there:
    `MultipleLosses({"metric": loss, "confusion": regularizer}, weights={"metric": 1, "confusion": w})`. It has no
    parameters.

    **The weight.** With `reduction="mean"` the value is the mean of log(1 + L_ec), at most log 5 on the unit
    sphere for any batch; choose w as for any mean-reduced loss. The paper's lambdas (triplet 0.02, N-pair 0.3,
    binomial 0.13; a tenth of that on SOP and In-Shop) multiply a *sum over ordered pairs*, beside metric losses
    that are *sums over the batch* (eqs. 8 to 10): use them with `reduction="ordered_sum"` and base losses with
    `SumReducer()`, never beside a mean-reduced loss. The paper's batches of 64 classes have 4,032 ordered pairs:
    lambda = 0.02 equals the weight 80.6 on the mean beside the summed loss, or the weight 0.63 beside that loss
    divided by the 128 images.

    Args:
        reduction: "mean" over pairs of classes, or the paper's "ordered_sum" (eqs. 7 and 11), which counts each
            pair of classes twice.
        log: Take log(1 + L_ec) of each pair (eq. 11), or L_ec itself (eq. 7).
        gradient: "fc": the gradient reaches the linear layer of the embeddings only, the paper's rule
            (section 4.2: "the overfitting mainly appears at the fc layer"); the regularizer then reads the
            `stopgrad_embeddings` of an `EmbeddingHead`, through `attach(head)` or `features=`. "all": it reads
            the embeddings that it is called with, and the whole network is regularised. The default is the method
            that the paper evaluates; without a head it raises an error.
        num_pairs: In every call, draw this many of the batch's pairs of classes ("randomly chosen", eq. 7), or
            all if there are fewer. Default: all. "ordered_sum" adds up only the drawn pairs.
        seed: Seed of the draws. They depend on it and on the number of calls so far, kept in the `state_dict`:
            all processes draw the same pairs, a resumed training continues the sequence, and no generator is
            touched.
        **kwargs: `distance` (any of PML's except similarities; squared Euclidean in closed form, others from the
            N x N matrix), `collect_stats`, `embedding_regularizer`, `embedding_reg_weight`, and `reducer`, which
            changes nothing, since the value is reduced over classes already.

    Default distance: `LpDistance(p=2, power=2)`, of normalised embeddings.
    Reducer input: **loss**, reduction type "already_reduced".

    Shape:
        embeddings (N, E), labels (N,); features (N, E) where `gradient="fc"`. `indices_tuple` is ignored:
        the equation has no tuples. With only one class, or no image, the value is 0, with a working backward.

    Raises:
        ValueError: for arguments out of range, for a similarity, or if embeddings and features are not matrices
            of one width.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> regularizer = EnergyConfusionRegularizer(gradient="all")
        >>> regularizer(torch.eye(4), torch.tensor([0, 0, 1, 1]))  # log(1 + 2)
        tensor(1.0986)
    """

    draws: Tensor | None

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        log: bool = True,
        gradient: Gradient = "fc",
        num_pairs: int | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, word, words in (
            ("reduction", reduction, get_args(Reduction)),
            ("gradient", gradient, get_args(Gradient)),
        ):
            if word not in words:
                raise ValueError(f"{name}: expected one of {', '.join(words)}; got {word!r}")
        if num_pairs is not None and (not isinstance(num_pairs, int) or num_pairs < 1):
            raise ValueError(
                f"num_pairs: expected a whole number from 1 on, or None for all pairs, got {num_pairs!r}"
            )
        if not isinstance(seed, int):
            raise ValueError(f"seed: expected a whole number, got {seed!r}")
        _check_distance(self.distance)
        self.reduction = reduction
        self.log = log
        self.gradient = gradient
        self.num_pairs = num_pairs
        self.seed = seed
        self.feature_names = ("stopgrad_embeddings",) if gradient == "fc" else ()
        start = None if num_pairs is None else _scramble(torch.tensor(seed % 2**32))
        self.register_buffer("draws", start)
        self.add_to_recordable_attributes(
            list_of_names=["reduction", "log", "gradient", "num_pairs", "seed"], is_stat=False
        )
        self.add_to_recordable_attributes(name="between_class_energy", is_stat=True)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, dict[str, Any]]:
        if embeddings.ndim != 2:
            raise ValueError(f"embeddings: expected (N, E), got shape {tuple(embeddings.shape)}")
        x = self._own_embeddings(embeddings) if self.gradient == "fc" else embeddings
        classes, last = _ranks(labels)
        # Compiled code needs one shape for all batches of a size: room for as many classes as images.
        room = len(labels) if torch.compiler.is_compiling() else int(last) + 1
        energies = self._energies(x, classes, room)
        pairs = self._pairs(last, room)
        terms = torch.log1p(energies) if self.log else energies  # eq. 11, or eq. 7
        value = (terms * pairs).sum()
        count = pairs.sum().clamp(min=1)
        if self.reduction == "mean":
            value = value / count
        if self.collect_stats:
            self.between_class_energy = ((energies.detach() * pairs).sum() / count).item()
        return {"loss": already_reduced(value)}

    def get_default_distance(self) -> LpDistance:
        return LpDistance(p=2, power=2)

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

    def _energies(self, x: Tensor, classes: Tensor, room: int) -> Tensor:
        """Mean distances between all classes: (C, C)."""
        distance = self.distance
        if type(distance) is LpDistance and distance.p == 2 and distance.power == 2:
            normalized = distance.maybe_normalize(x)
            distance.set_default_stats(x, x, normalized, normalized)
            return energy_confusion(normalized, classes, room)
        return _mean_distances(distance(x), classes, room)

    def _pairs(self, last: Tensor, room: int) -> Tensor:
        """Mask of the ordered pairs of classes 0 .. last that count, each with its reverse: (C, C) booleans."""
        index = torch.arange(room, device=last.device)
        low = torch.minimum(index.unsqueeze(1), index)
        high = torch.maximum(index.unsqueeze(1), index)
        pairs = (low < high) & (high <= last)
        if self.num_pairs is None or self.draws is None:
            return pairs
        # A bijection, new in every call, scrambles the pairs' numbers: the lowest results are drawn.
        tickets = _scramble(_scramble(self.draws) + high * (high - 1) // 2 + low)
        tickets = tickets.masked_fill(~pairs, 2**32)
        self.draws += 1
        worst = tickets.flatten().kthvalue(min(2 * self.num_pairs, tickets.numel())).values
        return pairs & (tickets <= worst)


def _ranks(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks of the labels (N,), 0 for the smallest one, and the highest rank, a scalar; 0 without labels.

    Equals `torch.unique`'s inverse, but waits for no size from the device.
    """
    ordered, order = labels.sort()
    ranks = F.pad((ordered[1:] != ordered[:-1]).cumsum(dim=0), (1, 0))
    return torch.empty_like(order).scatter(0, order, ranks), ranks[-1]


def _scramble(x: Tensor) -> Tensor:
    """A bijection of the integers below 2^32 that sends neighbours far apart.

    It multiplies and xor-shifts; the products stay below 2^63, so that all devices agree.
    """
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x045D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _check_distance(distance: Any) -> None:
    if not isinstance(distance, BaseDistance):
        raise ValueError(
            f"distance: expected one of PML's distances, such as LpDistance(power=2), got {distance!r}"
        )
    if distance.is_inverted:
        raise ValueError(
            f"distance: expected one that grows with distance, got the similarity {type(distance).__name__}; "
            "pass LpDistance(power=2), as the paper, or another of PML's"
        )
