"""AM-softmax plus joint representation similarity (see `joint_similarity.py`).

L_JRD = L_AMS + alpha L_JRS / N_pairs                               eq. 11
L_AMS = mean_i -log softmax_{y_i} of s (cos_ij - m [j = y_i])       eq. 12
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pytorch_metric_learning.losses import CosFaceLoss
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn
from torch.nn import functional as F

from ..features.feature_loss import FeatureLoss, already_reduced, check_width
from ..functional.checks import check_classes, number, one_of, whole_numbers
from ..functional.kernels import GaussianMixtureKernel, ReproducingKernel
from ..functional.precision import full_precision, without_autocast
from ..regularizers.joint_similarity import (
    between_classes,
    joint_kernel,
    kernel_modules,
    whole_batch,
)
from ..regularizers.joint_similarity_ablations import joint_intra, joint_mmd

_REGULARIZERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "jrs": lambda K, labels: K,
    "jmmd": joint_mmd,
    "jintra": joint_intra,
}


class JRDLoss(FeatureLoss):
    """AM-softmax plus joint representation similarity: the paper's whole objective (eq. 11).

    It owns the class weights W (E, C): **give `parameters()` to an optimizer**. The paper uses a hundred times the
    network's learning rate (a thousand on SOP). The similarity, which compares pooled features, L2-normalised
    embeddings and cosines with the class weights, without margin and scale, trains them too.

    Args:
        num_classes: C.
        embedding_size: E. The paper, section 5.1: 512.
        representations: The representations to compare. The paper's Table 2: all three are JRD; ("embeddings",) is
            MRD, ("pooled", "embeddings") JRD-C, ("embeddings", "classes") JRD-Pooling. Other names are features, as
            in `JRSRegularizer`.
        kernels: Kernels by representation, in place of the defaults of section 5.1: a mixture of 3 Gaussians, and
            a single Gaussian for "classes".
        similarity_weight: alpha. Section 5.1: 1 on CUB and Cars, 0.4 on SOP; Table 4: 1e-3 for the polynomial
            and exponential kernels.
        margin: m. Section 5.1: 0.1 on CUB and SOP, 0.05 on Cars.
        scale: s. Section 5.1: 20.
        regularizer: "jrs", or one that the paper compares it with, on the same kernels: "jmmd" (eq. 15) or
            "jintra" (eq. 16).
        **kwargs: As in any PML loss, except `distance`.

    Default reducer: `MeanReducer()`, the 1/M of eq. 12 and the 1/N_pairs of eq. 11.
    Reducer input: **metric**, AM-softmax, one value per image, reduction type "element"; **similarity**, alpha
    times the value of every ordered pair of different classes, "neg_pair". A mined `indices_tuple` weighs
    AM-softmax, as in any PML classification loss, and of the pairs only its negative ones count.

    Shape:
        embeddings (N, E), labels (N,) in 0..C-1, each feature (N, D).

    Raises:
        ValueError: for arguments out of range, kernels of other representations, a `distance`; in the call, for
            embeddings of another width, features that are not matrices, labels that are no classes or missing.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> loss = JRDLoss(num_classes=3, embedding_size=4)
        >>> embeddings, labels = torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 2])
        >>> loss(embeddings, labels, features={"pooled": torch.randn(5, 8)}).shape
        torch.Size([])
    """

    completed = ("kernels",)  # arguments that `get_default_NAME` completes if they give only a part

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        representations: Sequence[str] = ("pooled", "embeddings", "classes"),
        kernels: Mapping[str, ReproducingKernel] | None = None,
        similarity_weight: float = 1.0,
        margin: float = 0.1,
        scale: float = 20.0,
        regularizer: Literal["jrs", "jmmd", "jintra"] = "jrs",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        whole_numbers(num_classes=num_classes, embedding_size=embedding_size)
        number("similarity_weight", similarity_weight, least=0)
        number("margin", margin)
        number("scale", scale, above=0)
        one_of("regularizer", regularizer, _REGULARIZERS)
        if kernels:
            kernel_modules(kernels)  # raises if one is not a kernel
        kernels = dict(kernels or {})
        if isinstance(representations, str) or not kernels.keys() <= set(representations):
            raise ValueError(
                f"representations: expected names, among them those of all kernels ({', '.join(kernels)}), "
                f"got {representations!r}"
            )
        self.num_classes = num_classes
        self.embedding_size = embedding_size
        self.similarity_weight = similarity_weight
        self.regularizer = regularizer
        self.metric = _AMSoftmaxLoss(
            num_classes,
            embedding_size,
            margin=margin,
            scale=scale,
            # U(-1/sqrt(C), 1/sqrt(C)), as in the authors' code.
            weight_init_func=c_f.TorchInitWrapper(nn.init.kaiming_uniform_, a=math.sqrt(5)),
            collect_stats=self.collect_stats,
        )
        self.representations = tuple(representations)
        self.kernels = kernel_modules(self.get_default_kernels() | kernels)
        own = ("embeddings", "classes")
        self.feature_names = tuple(name for name in self.kernels if name not in own)
        self.add_to_recordable_attributes(
            list_of_names=["embedding_size", "similarity_weight", "regularizer"], is_stat=False
        )
        self.add_to_recordable_attributes(name="similarity", is_stat=True)

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        check_width(embeddings, self.embedding_size)
        c_f.labels_required(labels)
        if not labels.is_floating_point():
            labels = labels.long()  # PML's AM-softmax indexes by them
        check_classes(type(self).__name__, labels, self.num_classes)
        unit = F.normalize(embeddings)
        cosines = class_cosines(unit, self.metric.W)
        rows = {"embeddings": unit, "classes": cosines}
        rows |= whole_batch(self.named_features, embeddings)
        K = joint_kernel(rows, self.kernels)
        values = _REGULARIZERS[self.regularizer](K, labels)
        reducers = None if self.collect_stats else getattr(self.reducer, "reducers", None)
        reducer = getattr(reducers, "similarity", None)  # statistics are of all pairs
        similarity = between_classes(values, labels, indices_tuple, reducer)
        if self.collect_stats:
            self.similarity = similarity["losses"].mean().item()
        metric = self.metric.compute_loss(cosines, labels, indices_tuple, cosines, labels)["loss"]
        if len(embeddings) == 0:  # the mean over no image would be NaN
            metric = already_reduced(metric["losses"].sum())
        return {  # eq. 11
            "metric": {**metric, "divisor": len(embeddings)},
            "similarity": {**similarity, "losses": self.similarity_weight * similarity["losses"]},
        }

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s times the cosines with the class weights: (N, E) -> (N, C), as PML's classification losses return."""
        check_width(embeddings, self.embedding_size)
        with without_autocast(embeddings):
            unit = F.normalize(full_precision(embeddings))
            logits: Tensor = self.metric.get_logits(class_cosines(unit, self.metric.W))
        return logits

    def get_default_distance(self) -> None:
        """Return None: nothing uses it."""

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        return {
            name: GaussianMixtureKernel(
                1 if name == "classes" else 3, collect_stats=self.collect_stats
            )
            for name in self.representations
        }

    def _sub_loss_names(self) -> list[str]:
        return ["metric", "similarity"]


def class_cosines(unit: Tensor, W: Tensor) -> Tensor:
    """x^+ of eq. 9: L2-normalised embeddings (N, E), class weights (E, C) -> (N, C)."""
    W = W.to(unit.dtype)
    # Divides the products, which are fewer than the weights.
    lengths = torch.linalg.vector_norm(W, dim=0).clamp(min=1e-12)
    cosines: Tensor = unit @ W / lengths  # eq. 9
    return cosines


class _AMSoftmaxLoss(CosFaceLoss):
    """Eq. 12 on the cosines, known in PML as CosFace; here the class weights keep their dtype."""

    def cast_types(self, dtype: torch.dtype, device: torch.device) -> None:
        """Do nothing: PML would recast W in place to the embeddings' dtype, for good."""

    def compute_loss(
        self, cosines: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        """PML's values, from the cosines, which the similarity needs too; PML would wait for a GPU."""
        targets = labels.unsqueeze(1) == torch.arange(self.num_classes, device=labels.device)
        if self.collect_stats:
            self.modify_cosine_of_target_classes(cosines.detach()[targets])
        logits = self.scale_logits(torch.add(cosines, targets, alpha=-self.margin), cosines)
        losses = F.cross_entropy(logits, labels, reduction="none")
        if indices_tuple is not None:
            losses = losses * lmu.convert_to_weights(indices_tuple, labels, dtype=losses.dtype)
        indices = c_f.torch_arange_from_size(cosines)
        return {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}

    def get_cosine(self, cosines: Tensor) -> Tensor:
        """Return the cosines, passed in place of embeddings."""
        return cosines
