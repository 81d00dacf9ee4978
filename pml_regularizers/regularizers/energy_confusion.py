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
* The default is the mean over class pairs, whose scale does not depend on the number of classes. Eqs. 7 and 11 sum
  over ordered pairs.
* All pairs of classes count; the paper's "randomly chosen in the current minibatch" does not say how many do.
* The gradient reaches the whole network by default; section 4.2 ends it at the linear layer: `gradient="fc"`.
* Unit-length embeddings by default, as in the paper's triplet and binomial losses (eqs. 8, 10). Its N-pair loss
  (eq. 9) has raw ones: give the regularizer a `distance` that treats the embeddings as the metric loss does.
"""

from typing import Any, Literal, get_args

from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor

from ..distributed import gather_features
from ..features.feature_loss import FeatureLoss, already_reduced, sums_at_once, waits
from ..functional.checks import came, one_of
from ..functional.precision import in_float64
from ..offered.losses.energy_confusion_loss import EnergyConfusionLoss

Gradient = Literal["all", "fc"]


class EnergyConfusionRegularizer(FeatureLoss, EnergyConfusionLoss, BaseRegularizer):
    """Regularizer that keeps a metric loss from being too sure of the training classes, by pulling them together.

    By default the value is a mean, at most log 5 on the unit sphere. The paper's lambdas (triplet 0.02, N-pair 0.3,
    binomial 0.13; a tenth of that on SOP and In-Shop) multiply a *sum over ordered pairs*, beside metric losses
    that are *sums over the batch* (eqs. 8 to 10): use them with `reducer=SumReducer()` here and in the base losses,
    never beside a mean-reduced loss.

    Args:
        log: Take log(1 + L_ec) of each pair (eq. 11), or L_ec itself (eq. 7).
        gradient: "all": it reads the embeddings that it is called with, and the whole network is regularised.
            "fc": the gradient reaches the linear layer of the embeddings only, as the paper evaluates it
            (section 4.2: "the overfitting mainly appears at the fc layer"); the regularizer then reads the
            `stopgrad_embeddings` of an `EmbeddingHead`, through `attach(head)` or `features=`.
        **kwargs: `reducer`, `distance` (any of PML's except similarities; squared Euclidean in closed form, others
            from the N x N matrix), `collect_stats`, `embedding_regularizer`, `embedding_reg_weight`.

    Default distance: `LpDistance(p=2, power=2)`, of normalised embeddings. Default reducer: `MeanReducer()`.
    Reducer input: **loss**, for every ordered pair of classes, (I, J) and (J, I), by the indices of one image of
    each; reduction type "neg_pair".

    Shape:
        embeddings (N, E), labels (N,); features (N, E) where `gradient="fc"`. `indices_tuple` is ignored:
        the equation has no tuples. With only one class, or no image, the value is 0, with a working backward.

    Raises:
        ValueError: for an unknown `gradient`, for a similarity, if `attach` has nothing to attach to, or if
            embeddings and features are not matrices of one width.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> regularizer = EnergyConfusionRegularizer()
        >>> regularizer(torch.eye(4), torch.tensor([0, 0, 1, 1]))  # log(1 + 2)
        tensor(1.0986)
    """

    compares_classes = True

    def __init__(self, *, log: bool = True, gradient: Gradient = "all", **kwargs: Any) -> None:
        super().__init__(log=log, **kwargs)
        one_of("gradient", gradient, get_args(Gradient))
        self.gradient = gradient
        self.feature_names = ("stopgrad_embeddings",) if gradient == "fc" else ()
        self.add_to_recordable_attributes(name="gradient", is_stat=False)

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, *_: Any
    ) -> dict[str, dict[str, Any]]:
        self.distance.check_shapes(embeddings, None)
        x = embeddings if self.gradient == "all" else self._own_embeddings(embeddings)
        if sums_at_once(self.reducer, x) and not self.collect_stats:
            return {"loss": already_reduced(self._reduced(x, labels))}
        parts: dict[str, dict[str, Any]] = super().compute_loss(x, labels, None, x, labels)
        if not isinstance(parts["loss"]["losses"], Tensor):  # one class: 0, with a gradient
            parts["loss"]["losses"] = (x * 0).sum()
        return parts

    def _energies(self, x: Tensor, average: Any) -> Tensor:
        """Eq. 3, where values are not to be looked at in float64: neither TF32 nor close classes cost digits."""
        energies: Tensor = super()._energies(in_float64(x) if waits(x) else x, average)
        return energies.to(x)

    def _reduced(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean or sum over pairs of classes I and J as one over pairs of images, with weights 1 / (N_I N_J).

        No shape depends on the labels, and no class is searched for.
        """
        same = labels.unsqueeze(1) == labels
        p = 1 / in_float64(same.sum(dim=1))
        same = same.to(p.device)
        A = same * p  # row i averages over i's class
        energies = self._energies(x, lambda values: (A @ values.to(A)).to(values))
        weights = (p.unsqueeze(1) * p).masked_fill(same, 0).to(x)
        total: Tensor = (weights * self._terms(energies)).sum()
        C = p.sum().round().to(x)
        return total / (C * (C - 1)).clamp(min=1) if type(self.reducer) is MeanReducer else total

    def _own_embeddings(self, embeddings: Tensor) -> Tensor:
        """Embeddings of the whole batch whose gradient ends at the linear layer."""
        x = self.features
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f'features: gradient="fc" reads embeddings (n, {embeddings.shape[1]}) with a gradient to the '
                f"linear layer only, got {came(x)}; attach to an EmbeddingHead or its stopgrad_embeddings, "
                "or pass features=fc(pooled.detach())"
            )
        return gather_features([x], embeddings)[0]
