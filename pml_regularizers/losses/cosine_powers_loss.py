"""A metric loss on powers of the cosines of pooled features: what HORDE's sketches estimate, exactly.

    L = L(embeddings) + sum_k w_k L_k        L_k: the same loss, for which the similarity of images i and j
                                             is cos(x_i, x_j)^k, x their pooled features

Ours, from no paper. cos(x, y)^k is the cosine of the k-fold tensor products of x and y, their k-th moments in
HORDE (ICCV 2019, eq. 3) if an image has one position. So this is HORDE without positions, projections and
parameters; the matrix of cosines, which a loss computes anyway, takes the place of the sketches.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from pytorch_metric_learning.distances import (
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
)
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ..distributed import gather_features
from ..features.feature_loss import already_reduced
from ..functional.checks import at_least
from ..functional.precision import call_in_full_precision
from .per_output_loss import PerOutputLoss


class CosinePowersLoss(PerOutputLoss):
    """A metric loss, regularised by the same loss on powers of the pooled features' cosines.

    The embeddings have the loss itself, and each power a copy of it, or of `feature_loss`, whose parameters the
    first power trains. A mined `indices_tuple` serves all of them, and so does `enqueue_mask`, with features of all
    rows.

    Args:
        loss: Any PML loss on cosines or on Euclidean distances of normalised vectors, which are
            sqrt(2 - 2 cos^k). A trial refuses those that read vectors, or their lengths, otherwise than by their
            `distance`, such as `AngularLoss` and `LargeMarginSoftmaxLoss`; as the embeddings' loss, beside a
            `feature_loss`, any will do.
        powers: The powers k. Default: those that helped in our studies. An even power cannot tell opposite features
            apart: take odd ones for ViT, ConvNeXt and text encoders, whose features are of both signs.
        power_weight: w_k, the weight of each power.
        feature_loss: Loss of the powers if it differs from that of the embeddings. A loss with proxies or class
            weights needs one, as wide as the features: `ProxyAnchorLoss(num_classes, in_channels)`.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C).
        Pass the features as `features=`, or let `attach(head)` record the head's `pooled`.

    Raises:
        ValueError: for arguments out of range, a loss on other distances, or that does not return one number or
            reads features; for `reducer=` or `distance=`, which belong to it; in the call, for features that are no
            matrix.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = CosinePowersLoss(losses.MultiSimilarityLoss())
        >>> embeddings, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> loss(embeddings, labels, features=torch.rand(4, 32)).shape
        torch.Size([])
    """

    feature_names = ("pooled",)
    nested_feature_loss_hint = "itself; add it beside this one with MultipleLosses"
    width_hint = "; feature_loss=... takes one as wide as the features"

    def __init__(
        self,
        loss: nn.Module,
        *,
        powers: Sequence[int] = (2, 3),
        power_weight: float = 1.0,
        feature_loss: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self._signs_are_told = False
        self.powers = _different(powers)  # before super().__init__: PML asks for the sub-loss names
        super().__init__(**kwargs)
        self.power_weight = power_weight
        at_least("power_weight", power_weight, 0)
        given = feature_loss not in (None, loss)
        compared: nn.Module = feature_loss if feature_loss is not None else loss
        self.check_wrapped("loss", loss)
        self.check_wrapped("feature_loss", compared)
        raised = [with_power(compared, k, given and not i) for i, k in enumerate(self.powers)]
        _refuse_vectors("feature_loss" if given else "loss", raised[0])
        self.hold_losses(dict(zip(self._sub_loss_names(), [loss, *raised], strict=True)))
        self.add_to_recordable_attributes(list_of_names=["powers", "power_weight"], is_stat=False)

    def _sub_loss_names(self) -> list[str]:
        return ["embeddings", *(f"power_{k}" for k in self.powers)]

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        features = self.features
        if features.ndim != 2:
            raise ValueError(
                f"features: expected pooled features (N, C), got shape {tuple(features.shape)}; attach to an "
                'EmbeddingHead, write attach(module, embedder=head, pool="avg"), or pool them'
            )
        self._tell_signs(features)
        (rows,) = gather_features([in_range(features)], embeddings)
        compared = {name: embeddings if name == "embeddings" else rows for name in self.losses}
        return {
            name: already_reduced(value if name == "embeddings" else self.power_weight * value)
            for name, vectors in compared.items()
            for value in [self.sub_loss(name, vectors, labels, indices_tuple)]
        }

    def _tell_signs(self, features: Tensor) -> None:
        """Warn once, in the first call, of an even power on features of both signs."""
        even = [k for k in self.powers if k % 2 == 0]
        if self._signs_are_told or not even or torch.compiler.is_compiling() or is_fake(features):
            return
        self._signs_are_told = True
        signs = [float((sign * features > 0).float().mean()) for sign in (1, -1)]
        if min(signs) > 0.1:
            warnings.warn(
                f"powers: {even[0]} is even and cannot tell opposite features apart, and of these features "
                f"{signs[1]:.0%} are negative, as in ViT, ConvNeXt and text encoders; take odd powers, such as "
                "powers=(1, 3), or read features behind a ReLU",
                stacklevel=2,
            )


def _different(powers: Any) -> list[int]:
    """The powers, if they can be."""
    numbers = list(powers) if isinstance(powers, Iterable) else []
    whole = all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in numbers)
    if not numbers or not whole or len({*numbers}) < len(numbers):
        raise ValueError(f"powers: expected different whole numbers above 0, got {powers!r}")
    return numbers


def with_power(loss: nn.Module, k: int, shared: bool = False) -> nn.Module:
    """A copy of a loss on the k-th power of the cosine, perhaps with the same parameters."""
    loss = copy.deepcopy(loss, {id(own): own for own in loss.parameters()} if shared else None)
    for module in list(loss.modules()):
        if isinstance(module, BaseRegularizer):  # its distance is its own
            continue
        if getattr(module, "distance", None) is not None:
            module.distance = _power(module.distance, k)
    return loss


class _Replayed:
    """A method of a distance that returns, in a second run, what it returned in the first."""

    def __init__(self, method: Callable[..., Tensor]) -> None:
        self.method = method
        self.values: list[Tensor] = []
        self.again = False

    def __call__(self, *vectors: Tensor) -> Tensor:
        if self.again:
            return self.values.pop(0)
        self.values.append(self.method(*vectors))
        return self.values[-1]


def _refuse_vectors(name: str, loss: nn.Module) -> None:
    """Raise a ValueError if a loss's value depends on the vectors while all its distances stay the same."""
    tried = copy.deepcopy(loss)
    replayed: list[_Replayed] = []
    for module in tried.modules():
        distance = getattr(module, "distance", None)
        for method in ("compute_mat", "pairwise_distance") if distance is not None else ():
            if not isinstance(getattr(distance, method), _Replayed):
                replayed.append(_Replayed(getattr(distance, method)))
                setattr(distance, method, replayed[-1])
    labels = torch.tensor([0, 0, 1, 1], device="cpu")
    if is_fake(labels):
        return
    sizes = [size for x in loss.state_dict().values() for size in x.shape]
    reason: Exception | None = None
    for width in dict.fromkeys([*sizes, 6]):  # a loss with proxies takes vectors as wide as these
        vectors, values = torch.arange(1.0, 4 * width + 1, device="cpu").view(4, width).sin(), []
        for again in (False, True):
            for recorded in replayed:
                recorded.again = again
                recorded.values = recorded.values if again else []
            with (
                torch.device("cpu"),
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                try:
                    fresh = copy.deepcopy(tried, {id(method): method for method in replayed}).cpu()
                    x = 3 * vectors.cos() if again else vectors  # of other directions and lengths
                    values.append(float(call_in_full_precision(fresh, x, labels)))
                except Exception as error:
                    reason = error
                    break
        if len(values) == 2:
            if math.isclose(*values, rel_tol=1e-4, abs_tol=1e-6):
                return
            raise ValueError(
                f"{name}: {type(loss).__name__} reads vectors, or their lengths, and not their cosines alone: its "
                "value changes where its distances do not; choose another feature_loss=..."
            )
    if not sizes:
        raise ValueError(f"{name}: {type(loss).__name__} fails on a trial batch ({reason})")


def in_range(features: Tensor) -> Tensor:
    """Rows scaled, without a change of their directions, where their squares would leave the range of the dtype."""
    largest = features.detach().abs().amax(dim=1, keepdim=True)
    limits = torch.finfo(features.dtype)
    safe = (largest > limits.tiny**0.25) & (largest < limits.max**0.25)
    return features / torch.where(safe | (largest == 0) | ~largest.isfinite(), 1, largest)


def _power(distance: Any, k: int) -> nn.Module:
    """The distance of the k-fold tensor products, for one of normalised vectors."""
    if distance.normalize_embeddings and distance.p == 2:
        if isinstance(distance, DotProductSimilarity):
            return TensorProductSimilarity(k, power=distance.power)
        if type(distance) is LpDistance:
            return TensorProductDistance(k, power=distance.power)
    raise ValueError(
        f"loss: expected one on CosineSimilarity or the normalised LpDistance(p=2), got {type(distance).__name__}("
        f"p={distance.p}, normalize_embeddings={distance.normalize_embeddings})"
    )


class TensorProductSimilarity(CosineSimilarity):
    """Cosine of the k-fold tensor products: <x, y>^k, of normalised vectors."""

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        cosine: Tensor = super().compute_mat(query_emb, ref_emb)
        return cosine**self.k

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        cosine: Tensor = super().pairwise_distance(query_emb, ref_emb)
        return cosine**self.k


class TensorProductDistance(LpDistance):
    """Euclidean distance of the k-fold tensor products of normalised vectors: sqrt(2 - 2 <x, y>^k).

    As |x - y| sqrt(1 + c + ... + c^(k-1)), c = <x, y>, which does not cancel where x and y are near.
    """

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor:
        ref_emb = query_emb if ref_emb is None else ref_emb
        query_emb, ref_emb = self._without_zeros(query_emb), self._without_zeros(ref_emb)
        distance: Tensor = super().compute_mat(query_emb, ref_emb)
        return distance * self._stretch(query_emb @ ref_emb.T)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        query_emb, ref_emb = self._without_zeros(query_emb), self._without_zeros(ref_emb)
        distance: Tensor = super().pairwise_distance(query_emb, ref_emb)
        return distance * self._stretch((query_emb * ref_emb).sum(dim=1))

    def _without_zeros(self, rows: Tensor) -> Tensor:
        """The rows, where one of zeros is a constant: its tensor product has the gradient 0 for k > 1."""
        return rows if self.k == 1 else torch.where(rows.any(1, keepdim=True), rows, rows.detach())

    def _stretch(self, cosine: Tensor) -> Tensor:
        total = torch.ones_like(cosine)
        for _ in range(self.k - 1):
            total = 1 + total * cosine
        return total.clamp(min=torch.finfo(cosine.dtype).eps).sqrt()
