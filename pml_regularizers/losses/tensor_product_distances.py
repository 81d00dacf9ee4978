"""Distances of k-fold tensor products, and losses on them: the k-th powers of cosines, without the products.

The cosine of x^(k) and y^(k) is cos(x, y)^k, and so is the inner product of two images' k-th moments in HORDE (ICCV
2019, eq. 3) if each has one position. A loss that reads its vectors by their distance alone takes such a power with
another distance, at no cost.
"""

import copy
import math
import warnings
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

from ..functional.precision import call_in_full_precision


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
    """Euclidean distance of the k-fold tensor products of normalised vectors: sqrt(2 - 2 <x, y>^k), for k > 1.

    As |x - y| sqrt(1 + c + ... + c^(k-1)), c = <x, y>, which does not cancel where x and y are near.
    """

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor:
        query_emb = _without_zeros(query_emb)
        ref_emb = query_emb if ref_emb is None else _without_zeros(ref_emb)
        distance: Tensor = super().compute_mat(query_emb, ref_emb)
        return distance * self._stretch(query_emb @ ref_emb.T)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        query_emb, ref_emb = _without_zeros(query_emb), _without_zeros(ref_emb)
        distance: Tensor = super().pairwise_distance(query_emb, ref_emb)
        return distance * self._stretch((query_emb * ref_emb).sum(dim=1))

    def _stretch(self, cosine: Tensor) -> Tensor:
        total = torch.ones_like(cosine)
        for _ in range(self.k - 1):
            total = 1 + total * cosine
        return total.clamp(min=torch.finfo(cosine.dtype).eps).sqrt()


def _without_zeros(rows: Tensor) -> Tensor:
    """The rows, where one of zeros is a constant: its tensor product has the gradient 0."""
    return torch.where(rows.any(1, keepdim=True), rows, rows.detach())


def with_power(name: str, loss: nn.Module, k: int, *, shared: bool) -> nn.Module:
    """The loss of argument `name` on the k-fold tensor products: a copy, perhaps with the same parameters.

    With k = 1 and the same parameters, it is the loss itself.

    Raises:
        ValueError: for distances of vectors that are not normalised, or others than cosine and Euclidean.
    """
    if k == 1 and shared:
        return loss
    loss = copy.deepcopy(loss, {id(own): own for own in loss.parameters()} if shared else None)
    for module in list(loss.modules()) if k > 1 else []:
        if isinstance(module, BaseRegularizer):  # its distance is its own
            continue
        if getattr(module, "distance", None) is not None:
            module.distance = _power(name, module.distance, k)
    return loss


def _power(name: str, distance: Any, k: int) -> nn.Module:
    if distance.normalize_embeddings and distance.p == 2:
        if isinstance(distance, DotProductSimilarity):
            return TensorProductSimilarity(k, power=distance.power)
        if type(distance) is LpDistance:
            return TensorProductDistance(k, power=distance.power)
    raise ValueError(
        f"{name}: expected one on CosineSimilarity or the normalised LpDistance(p=2), got "
        f"{type(distance).__name__}(p={distance.p}, normalize_embeddings={distance.normalize_embeddings})"
    )


def refuse_vectors(name: str, loss: nn.Module) -> None:
    """Raise a ValueError, about argument `name`, if a loss reads its vectors otherwise than by its distances.

    A trial: the value for other vectors must be the same while all distances stay those of the first ones.
    """
    sizes = [size for x in loss.state_dict().values() for size in x.shape]
    reason: Exception | None = None
    for width in dict.fromkeys([*sizes, 6]):  # a loss with proxies takes vectors as wide as these
        vectors = torch.arange(1.0, 4 * width + 1, device="cpu").view(4, width).sin()
        if is_fake(vectors):
            return
        try:
            value, distances = _tried(loss, vectors, None)
            again, _ = _tried(loss, 3 * vectors.cos(), distances)  # other directions and lengths
        except Exception as error:
            reason = error
            continue
        if math.isclose(value, again, rel_tol=1e-4, abs_tol=1e-6):
            return
        raise ValueError(
            f"{name}: {type(loss).__name__} reads vectors, or their lengths, and not their cosines alone: its "
            "value changes where its distances do not; take another loss for the powers, or powers=(1,)"
        )
    if not sizes:
        raise ValueError(f"{name}: {type(loss).__name__} fails on a trial batch ({reason})")


def _tried(
    loss: nn.Module, vectors: Tensor, replayed: list[Tensor] | None
) -> tuple[float, list[Tensor]]:
    """The value of a copy of a loss, and all its distances, which are those of an earlier trial if given."""
    recorded: list[Tensor] = []

    def kept(method: Any) -> Any:
        def call(*pair: Tensor) -> Tensor:
            recorded.append(method(*pair) if replayed is None else replayed[len(recorded)])
            return recorded[-1]

        return call

    tried = copy.deepcopy(loss).cpu()
    for distance in {getattr(module, "distance", None) for module in tried.modules()} - {None}:
        for name in ("compute_mat", "pairwise_distance"):
            setattr(distance, name, kept(getattr(distance, name)))
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),  # so that each trial draws the same numbers
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        labels = torch.tensor([0, 0, 1, 1])
        return float(call_in_full_precision(tried, vectors, labels)), recorded
