"""The value that the oracles give for a loss with its settings and state.

Each function takes a loss and a batch. Copies of base losses are called as they are: these have their own oracles.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import islice
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning import reducers
from torch import Tensor, nn

from pml_regularizers import (
    CosinePowersLoss,
    GaussianMixtureKernel,
    HighOrderMoments,
    HORDELoss,
    LaplaceKernel,
    PolynomialKernel,
    PooledFeaturesLoss,
)
from tests.oracles import energy_confusion as ec_oracle
from tests.oracles import horde as horde_oracle
from tests.oracles import joint_similarity as jrd_oracle
from tests.oracles.base_losses import am_softmax
from tests.oracles.ensemble import divergences
from tests.oracles.variance_attention import variance_loss

Exact = Callable[[Any, Any], float]


def numbers(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def of_embeddings(oracle: Callable[[np.ndarray, Sequence[int]], float]) -> Exact:
    return lambda loss, batch: oracle(numbers(batch.embeddings), batch.labels.tolist())


def by_copies(
    losses: Iterable[nn.Module], vectors: Sequence[np.ndarray], labels: Tensor
) -> list[float]:
    """The values of copies of base losses, each on vectors of its own."""
    return [
        copy.deepcopy(loss).double()(torch.from_numpy(x), labels).item()
        for loss, x in zip(losses, vectors, strict=True)
    ]


# HORDE


def kept_features(features: Tensor | tuple[Tensor, Tensor]) -> list[np.ndarray]:
    """For each image its features (P, C), in float64."""
    if isinstance(features, tuple):
        tokens, kept = features
        return [t[k].double().numpy() for t, k in zip(tokens, kept, strict=True)]
    if features.ndim == 4:
        features = features.permute(0, 2, 3, 1).flatten(1, 2)
    return [image.detach().double().numpy() for image in features]


def as_matrix(table: Tensor, channels: int) -> np.ndarray:
    """The count sketch that a table (d, R) describes: (C, d)."""
    matrix = np.zeros((channels, len(table)))
    for bucket, entries in enumerate(table.tolist()):
        for number in filter(None, entries):
            matrix[abs(number) - 1, bucket] += np.sign(number)
    return matrix


def moments(module: HighOrderMoments, features: Tensor | tuple[Tensor, Tensor]) -> list[np.ndarray]:
    """K - 1 arrays (N, d)."""
    given: Any = module.weights()
    if module.projections == "sketch":
        function, given = horde_oracle.sketched, [as_matrix(W, module.in_channels) for W in given]
    elif module.projections == "independent":
        parts = iter(map(numbers, given))
        given = [list(islice(parts, k)) for k in range(2, module.order + 1)]
        function = horde_oracle.independent
    else:
        function, given = horde_oracle.cascaded, list(map(numbers, given))
    images = [function(image, given) for image in kept_features(features)]
    return [np.stack(order) for order in zip(*images, strict=True)]


def orders(loss: HORDELoss, features: Any) -> list[np.ndarray]:
    """Inputs of the losses of orders 2 to K."""
    matrices = [
        numbers(embedding.weight) if isinstance(embedding, nn.Linear) else None
        for embedding in loss.embeddings.values()
    ]
    return [
        np.stack([horde_oracle.embed(z, matrix, loss.normalize) for z in order])
        for order, matrix in zip(moments(loss.moments, features), matrices, strict=True)
    ]


def horde(loss: HORDELoss, batch: Any) -> float:
    vectors = [numbers(batch.embeddings), *orders(loss, batch.features["feature_map"])]
    values = by_copies(loss.losses.values(), vectors, batch.labels)
    return math.fsum(w * v for w, v in zip([1.0, *loss.order_weights], values, strict=True))


# Powers of cosines


def pooled_features(loss: PooledFeaturesLoss, batch: Any, inside: str = "power_1") -> float:
    """The loss inside on the k-fold tensor products of the normalised features."""
    features = ec_oracle.unit(numbers(batch.features["pooled"]))
    vectors = [np.array([reduce(np.kron, [x] * k) for x in features]) for k in loss.powers]
    values = by_copies([loss.losses[inside]] * len(vectors), vectors, batch.labels)
    return math.fsum(w * value for w, value in zip(loss.power_weights, values, strict=True))


def cosine_powers(loss: CosinePowersLoss, batch: Any) -> float:
    base = loss.losses["embeddings"]
    (value,) = by_copies([base], [numbers(batch.embeddings)], batch.labels)
    return value + pooled_features(loss, batch, "embeddings")


# Energy confusion and variance


def confusion(loss: Any, batch: Any) -> float:
    fc, distance = loss.gradient == "fc", loss.distance
    x = numbers(batch.features["stopgrad_embeddings"] if fc else batch.embeddings)
    if distance.normalize_embeddings:
        x = ec_oracle.unit(x, distance.p)

    def between(a: np.ndarray, b: np.ndarray) -> float:
        return float((np.abs(a - b) ** distance.p).sum() ** (distance.power / distance.p))

    terms = ec_oracle.terms(x, batch.labels.tolist(), log=loss.log, distance=between).values()
    return math.fsum(terms) / len(terms)


def variance(loss: Any, batch: Any) -> float:
    pooled, rows = map(numbers, batch.features["attention"])
    return variance_loss(pooled, rows.mean(axis=0), unbiased=loss.unbiased)


# Joint similarity


def kernel(made: Any) -> jrd_oracle.Kernel:
    """The oracle of a kernel."""
    if isinstance(made, GaussianMixtureKernel):
        K = made.components
        multiples = [2.0 ** (k - K // 2) for k in range(K)]
        found = jrd_oracle.gaussian_mixture(multiples, made.bandwidth or 0.0)
    elif isinstance(made, LaplaceKernel):
        found = jrd_oracle.laplace(made.bandwidth or 0.0)
    elif isinstance(made, PolynomialKernel):
        found = jrd_oracle.polynomial(made.degree, made.constant)
    else:
        found = jrd_oracle.exponential
    return lambda rows: found(jrd_oracle.unit(rows) if made.normalize else rows)


def joint_kernel(loss: Any, rows: dict[str, Any]) -> list[list[float]]:
    """Of the representations that the loss has kernels for."""
    chosen = [numbers(torch.as_tensor(rows[name])) for name in loss.kernels]
    return jrd_oracle.joint([kernel(made) for made in loss.kernels.values()], chosen)


def joint(name: str) -> Exact:
    """The value of `jrs`, `jmmd`, `jintra` or `intra_class`."""

    def exact(loss: Any, batch: Any) -> float:
        K = joint_kernel(loss, {"embeddings": batch.embeddings, **batch.features})
        if name == "intra_class":
            return jrd_oracle.intra_class(K, batch.labels.tolist())
        total, pairs = getattr(jrd_oracle, name)(K, batch.labels.tolist())
        return float(total / (1 if isinstance(loss.reducer, reducers.SumReducer) else pairs))

    return exact


def jrd(loss: Any, batch: Any) -> float:
    labels, unit = batch.labels.tolist(), jrd_oracle.unit(numbers(batch.embeddings))
    classes = jrd_oracle.class_cosines(unit, numbers(loss.metric.W))
    K = joint_kernel(loss, {**batch.features, "embeddings": unit, "classes": classes})
    total, pairs = getattr(jrd_oracle, loss.regularizer)(K, labels)
    settings = {"m": loss.metric.margin, "s": loss.metric.scale}
    metric = am_softmax(unit, labels, numbers(loss.metric.W).T, **settings)
    return metric + loss.similarity_weight * total / pairs


# Ensembles and sums


def heads(loss: Any, batch: Any) -> np.ndarray:
    x = numbers(batch.embeddings)
    return x.reshape(len(x), loss.num_heads, -1) * math.sqrt(loss.num_heads)


def ensemble(loss: Any, batch: Any) -> float:
    vectors = list(heads(loss, batch).swapaxes(0, 1).copy())
    total = math.fsum(by_copies(loss.losses.values(), vectors, batch.labels))
    total /= loss.num_heads if loss.reduction == "mean" else 1
    if loss.embedding_regularizer is None:
        return total
    return total + loss.embedding_reg_weight * divergence(loss.embedding_regularizer, batch)


def divergence(loss: Any, batch: Any) -> float:
    """Half the hinge on squared distances, whose margin is 2 - 2 s, is the hinge on cosines."""
    same = loss.images == "same"
    values = divergences(heads(loss, batch), 2 - 2 * loss.margin, same=same)
    above = [value / 2 for value in values if value > 0]
    return math.fsum(above) / len(above) if above else 0.0


def several(parts: dict[str, Exact]) -> Exact:
    return lambda loss, batch: math.fsum(
        loss.weights[name] * exact(loss.losses[name], batch) for name, exact in parts.items()
    )


def inside(exact: Exact) -> Exact:
    """The value of the loss in a `DistributedLoss`."""
    return lambda loss, batch: exact(loss.loss, batch)
