"""High-order regularizers for deep metric learning, as pytorch-metric-learning losses."""

from typing import TYPE_CHECKING, Any

from .distributed import DistributedLoss, prepare_loss
from .features.feature_loss import FeatureLoss, attach_all
from .features.feature_tap import MissingFeaturesError
from .functional.kernels import GaussianKernel, GaussianMixtureKernel
from .gradient_cache import GradientCache
from .heads.attention_ensemble import AttentionEnsemble
from .heads.closed_form import pca_init_, whitening_init_
from .heads.embedding_head import EmbeddingHead
from .heads.split_trunk import split_trunk
from .heads.variance_attention import VEMAttention
from .losses.binomial_deviance_loss import BinomialDevianceLoss
from .losses.cosine_contrastive_loss import CosineContrastiveLoss
from .losses.cosine_powers_loss import CosinePowersLoss
from .losses.dense_n_pairs_loss import DenseNPairsLoss
from .losses.ensemble_loss import DivergenceLoss, EnsembleLoss
from .losses.high_order_moments import HighOrderMoments
from .losses.horde_loss import HORDELoss
from .losses.jrd_loss import JRDLoss
from .losses.pooled_features_loss import PooledFeaturesLoss
from .optimizer_groups import parameter_groups
from .regularizers.energy_confusion import EnergyConfusionRegularizer
from .regularizers.joint_similarity import JRSRegularizer
from .regularizers.joint_similarity_ablations import (
    ExponentialKernel,
    IntraClassRegularizer,
    LaplaceKernel,
    PolynomialKernel,
)
from .regularizers.variance import VarianceRegularizer

if TYPE_CHECKING:
    from .metrics.rank_accuracy import RankAccuracyCalculator

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - grouped by kind, as a reader looks for them
    # The papers' methods: losses, and regularizers to add to one.
    "HORDELoss",
    "HighOrderMoments",
    "JRDLoss",
    "JRSRegularizer",
    "IntraClassRegularizer",
    "EnergyConfusionRegularizer",
    "VarianceRegularizer",
    # What HORDE's fixed projections estimate, exactly; beside the loss, and in one object with it.
    "PooledFeaturesLoss",
    "CosinePowersLoss",
    # Base losses of their experiments that PML lacks, and those of an ensemble.
    "BinomialDevianceLoss",
    "CosineContrastiveLoss",
    "DenseNPairsLoss",
    "EnsembleLoss",
    "DivergenceLoss",
    # Between a trunk and a loss.
    "EmbeddingHead",
    "pca_init_",
    "whitening_init_",
    "VEMAttention",
    "AttentionEnsemble",
    "split_trunk",
    # How features reach a loss; several processes; large batches; optimizers.
    "FeatureLoss",
    "MissingFeaturesError",
    "attach_all",
    "DistributedLoss",
    "prepare_loss",
    "GradientCache",
    "parameter_groups",
    # Reproducing kernels, and the accuracy of rankings.
    "ExponentialKernel",
    "GaussianKernel",
    "GaussianMixtureKernel",
    "LaplaceKernel",
    "PolynomialKernel",
    "RankAccuracyCalculator",
]


def __getattr__(name: str) -> Any:
    # PML's accuracies import faiss and scikit-learn, which no loss needs.
    if name == "RankAccuracyCalculator":
        from .metrics.rank_accuracy import RankAccuracyCalculator

        return RankAccuracyCalculator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
