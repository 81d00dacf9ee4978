"""Every public loss and module, and a call of it, for test_contract.py.

A new class needs an entry here; a test fails until it has one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning import distances, losses, reducers
from torch import Tensor, nn

from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    CosineContrastiveLoss,
    CosinePowersLoss,
    DenseNPairsLoss,
    DistributedLoss,
    DivergenceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    EnsembleLoss,
    ExponentialKernel,
    FeatureLoss,
    GaussianKernel,
    GaussianMixtureKernel,
    HighOrderMoments,
    HORDELoss,
    IntraClassRegularizer,
    JRDLoss,
    JRSRegularizer,
    LaplaceKernel,
    PolynomialKernel,
    PooledFeaturesLoss,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
)
from pml_regularizers.features.feature_maps import FeatureModule
from tests.library import expected
from tests.oracles import base_losses
from tests.oracles.binomial_deviance import binomial_deviance

WIDTH, CHANNELS, CLASSES, HEADS = 6, 5, 4, 3
LABELS = torch.tensor([0, 2, 1, 0, 3, 1, 1, 2, 0, 2])  # classes of 3, 3, 3 and 1

# A feature is a tensor, or a tuple of tensors. Drawn by its name, which is its stage's in an EmbeddingHead.
DRAWN: dict[str, Callable[[int], Any]] = {
    "feature_map": lambda n: torch.randn(n, CHANNELS, 2, 3),
    "pooled": lambda n: torch.randn(n, CHANNELS),
    "stopgrad_embeddings": lambda n: torch.randn(n, WIDTH),
    "attention": lambda n: (torch.randn(n, CHANNELS), torch.randn(n, CHANNELS)),
}


@dataclass(frozen=True)
class Batch:
    """Arguments of a call of a loss."""

    embeddings: Tensor
    labels: Tensor
    features: Mapping[str, Any]

    @classmethod
    def draw(cls, case: "Case", labels: Tensor = LABELS) -> "Batch":
        n = len(labels)
        return cls(torch.randn(n, WIDTH), labels, {name: DRAWN[name](n) for name in case.features})

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The function of the embeddings and of every feature."""
        features = {
            name: tuple(map(function, value)) if isinstance(value, tuple) else function(value)
            for name, value in self.features.items()
        }
        return Batch(function(self.embeddings), self.labels, features)

    def to(self, dtype: torch.dtype) -> "Batch":
        return self.map(lambda x: x.to(dtype))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "embeddings", self.embeddings
        for name, value in self.features.items():
            parts = value if isinstance(value, tuple) else (value,)
            yield from ((f"{name}.{index}", part) for index, part in enumerate(parts))


@dataclass(frozen=True)
class Case:
    """Recipe for a loss, and the inputs that it depends on.

    `embeddings`: does the value depend on them, or on the features alone? `labels`: does it depend on them?
    `tuples`: does the equation have any, so that `indices_tuple` counts? `reducer`: is the argument taken?
    `exact`: the value by the oracles, which makes a draw of pairs its own test.
    """

    make: Callable[..., nn.Module]
    exact: expected.Exact
    features: tuple[str, ...] = ()
    embeddings: bool = True
    labels: bool = True
    tuples: bool = False
    reducer: bool = True


class Stages(FeatureModule):
    """Has the stages of an `EmbeddingHead`, and hands each feature to whatever is attached to its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_map = nn.Identity()
        self.pooled = nn.Identity()
        self.stopgrad_embeddings = nn.Identity()
        self.attention = nn.Module()
        self.attention.statistics = nn.Identity()

    def forward(self, features: Mapping[str, Any], embeddings: Tensor) -> Tensor:
        for name, value in features.items():
            stage = getattr(self, name)
            getattr(stage, "statistics", stage)(value)
        return embeddings


def call(loss: nn.Module, batch: Batch, tuples: tuple[Tensor, ...] | None = None) -> Tensor:
    """The loss of a batch, whose features are passed where the loss takes them, and tapped elsewhere."""
    inner = getattr(loss, "_orig_mod", loss)  # torch.compile's
    inner = inner.loss if isinstance(inner, DistributedLoss) else inner
    extra = {}
    if isinstance(inner, FeatureLoss) and inner.feature_names:
        extra = {"features": dict(batch.features)}
    elif batch.features:
        feed(inner, batch)
    value: Tensor = loss(batch.embeddings, batch.labels, tuples, **extra)
    return value


def feed(loss: nn.Module, batch: Batch) -> None:
    """Attach all that reads features, and let the batch's features pass their stages."""
    stages = Stages()
    attach_all(loss, stages)
    stages(batch.features, batch.embeddings)


def horde(base: Callable[[], nn.Module], **settings: Any) -> Callable[..., HORDELoss]:
    settings = {"order": 5, "moment_dim": 7, "projections": "cascaded", **settings}
    return lambda **kwargs: HORDELoss(base(), CHANNELS, WIDTH, **settings, **kwargs)


def triplet() -> nn.Module:
    """Not PML's default, whose reducer drops NaN, and whose distance has no gradient where it is zero."""
    return losses.TripletMarginLoss(
        distance=distances.LpDistance(power=2), reducer=reducers.MeanReducer()
    )


def proxies() -> nn.Module:
    return losses.ProxyAnchorLoss(CLASSES, WIDTH)


def jrs(kernel: Callable[[], Any]) -> Case:
    def make(**kwargs: Any) -> nn.Module:
        return JRSRegularizer({name: kernel() for name in ("pooled", "embeddings")}, **kwargs)

    return Case(make, expected.joint("jrs"), ("pooled",), tuples=True)


def jrd(*representations: str, **settings: Any) -> Case:
    make = partial(JRDLoss, CLASSES, WIDTH, representations=representations, **settings)
    features = ("pooled",) if "pooled" in representations else ()
    return Case(make, expected.jrd, features, tuples=True)


def ensemble(base: Callable[[], nn.Module], **settings: Any) -> Case:
    def make(**kwargs: Any) -> nn.Module:
        return EnsembleLoss(base(), HEADS, **settings, **kwargs)

    return Case(make, expected.ensemble, tuples=True, reducer=False)


def together() -> losses.MultipleLosses:
    return losses.MultipleLosses(
        {
            "horde": horde(BinomialDevianceLoss, order=2)(),
            "variance": VarianceRegularizer(),
            "confusion": EnergyConfusionRegularizer(gradient="fc"),
            "joint": JRSRegularizer(),
        },
        weights={"horde": 1.0, "variance": 0.5, "confusion": 0.3, "joint": 2.0},
    )


LOSSES: dict[str, Case] = {
    **{
        name: Case(make, expected.of_embeddings(oracle), tuples=True)
        for name, make, oracle in (
            ("binomial", BinomialDevianceLoss, lambda x, y: binomial_deviance(x, y) / len(y)),
            (
                "binomial, summed",
                partial(BinomialDevianceLoss, balanced=False, reducer=reducers.SumReducer()),
                base_losses.ecaml_binomial,
            ),
            ("contrastive", CosineContrastiveLoss, base_losses.horde_contrastive),
            (
                "n-pairs",
                partial(DenseNPairsLoss, reducer=reducers.SumReducer()),
                base_losses.ecaml_n_pair,
            ),
        )
    },
    **{
        f"HORDE, {name}": Case(make, expected.horde, ("feature_map",), tuples=True, reducer=False)
        for name, make in {
            "binomial": horde(BinomialDevianceLoss),
            "proxies": horde(lambda: losses.ArcFaceLoss(CLASSES, WIDTH), order=3),
            "independent": horde(BinomialDevianceLoss, projections="independent", order=3),
            "sketch": horde(BinomialDevianceLoss, projections="sketch", order=3),
            "random proxies": horde(proxies, projections="random", embed_orders=True, order=3),
            "own order 1": lambda **more: horde(
                proxies, feature_loss=CosineContrastiveLoss(), order=2
            )(**more),
        }.items()
    },
    "powers": Case(
        partial(CosinePowersLoss, BinomialDevianceLoss()), expected.cosine_powers, ("pooled",),
        tuples=True, reducer=False,
    ),
    "pooled features": Case(
        partial(PooledFeaturesLoss, triplet(), powers=(1, 4), power_weights=(0.7, 0.5)),
        expected.pooled_features, ("pooled",), embeddings=False, tuples=True, reducer=False,
    ),
    "EC": Case(
        partial(EnergyConfusionRegularizer, gradient="fc"), expected.confusion,
        ("stopgrad_embeddings",), embeddings=False,
    ),
    "EC, eq. 7": Case(partial(EnergyConfusionRegularizer, log=False), expected.confusion),
    "EC, raw cityblock": Case(
        partial(EnergyConfusionRegularizer, distance=distances.LpDistance(p=1, normalize_embeddings=False)),
        expected.confusion,
    ),
    "variance": Case(
        VarianceRegularizer, expected.variance, ("attention",), embeddings=False, labels=False
    ),
    "JRS": jrs(GaussianMixtureKernel),
    "JRS, Laplace": jrs(LaplaceKernel),
    "JRS, exponential": jrs(partial(ExponentialKernel, normalize=True)),
    "intra-class": Case(IntraClassRegularizer, expected.joint("intra_class")),
    "JRD": jrd("pooled", "embeddings", "classes"),
    "JRD, JMMD": jrd("pooled", "embeddings", "classes", regularizer="jmmd"),
    "JRD, JIntra": jrd("pooled", "embeddings", "classes", regularizer="jintra"),
    "JRD-Pooling": jrd("embeddings", "classes"),
    "ensemble": ensemble(lambda: losses.ProxyAnchorLoss(CLASSES, WIDTH // HEADS)),
    "ensemble, ABE": ensemble(
        CosineContrastiveLoss,
        reduction="sum",
        embedding_regularizer=DivergenceLoss(HEADS, 0.1),
        embedding_reg_weight=0.5,
    ),
    "divergence": Case(partial(DivergenceLoss, HEADS, 0.1), expected.divergence, labels=False),
    "several": Case(
        together,
        expected.several({
            "horde": expected.horde, "variance": expected.variance, "confusion": expected.confusion,
            "joint": expected.joint("jrs"),
        }),
        ("feature_map", "attention", "stopgrad_embeddings", "pooled"), tuples=True, reducer=False,
    ),
    "distributed": Case(
        lambda: DistributedLoss(horde(BinomialDevianceLoss, order=2)()),
        expected.inside(expected.horde), ("feature_map",), tuples=True, reducer=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A public module that is no loss: it maps a tensor with one row per image to tensors.

    `pairs`: the result is a matrix, of all pairs of rows. `raised`: it is of full precision at least.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pairs: bool = False
    raised: bool = False


def network() -> AttentionEnsemble:
    return AttentionEnsemble(
        nn.Sequential(nn.Conv2d(3, CHANNELS, 3), nn.Tanh()),
        nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.Tanh()),
        stem_channels=CHANNELS,
        body_channels=4,
        embedding_size=WIDTH,
        num_heads=HEADS,
    )


MODULES: dict[str, Module] = {
    "head": Module(lambda: EmbeddingHead(CHANNELS, WIDTH), (CHANNELS, 2, 3)),
    "head, tokens": Module(lambda: EmbeddingHead(CHANNELS, WIDTH, pool="max"), (7, CHANNELS)),
    "head, attention": Module(
        lambda: EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention), (CHANNELS, 2, 3)
    ),
    "VEM": Module(lambda: VEMAttention(CHANNELS), (CHANNELS,)),
    "ensemble": Module(network, (3, 5, 5)),
    **{
        f"moments, {projections}": Module(
            partial(HighOrderMoments, CHANNELS, order=5, moment_dim=7, projections=projections),
            (CHANNELS, 2, 3),
            raised=True,
        )
        for projections in ("cascaded", "independent", "random", "sketch")
    },
    **{
        f"{name} kernel": Module(make, (WIDTH,), pairs=True, raised=True)
        for name, make in {
            "mixture": GaussianMixtureKernel,
            "Gaussian": GaussianKernel,
            "Laplace": LaplaceKernel,
            "polynomial": PolynomialKernel,
            "exponential": partial(ExponentialKernel, normalize=True),
        }.items()
    },
}
