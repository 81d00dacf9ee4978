"""High-order regularizers for deep metric learning, as pytorch-metric-learning losses."""

from typing import TYPE_CHECKING, Any

from .attention_ensemble import AttentionEnsemble
from .binomial_deviance import BinomialDevianceLoss
from .cosine_contrastive import CosineContrastiveLoss
from .dense_n_pairs import DenseNPairsLoss
from .distributed import DistributedLoss, prepare_loss
from .energy_confusion import EnergyConfusionRegularizer, energy_confusion
from .ensemble_loss import DivergenceLoss, EnsembleLoss
from .feature_loss import FeatureLoss, attach_all
from .feature_tap import FeatureTap, MissingFeaturesError
from .gradient_ratios import capture_loss_terms, gradient_norm_ratios
from .heads import EmbeddingHead
from .horde import HORDELoss
from .joint_similarity import IntraClassRegularizer, JRSRegularizer, joint_kernel
from .jrd import JRDLoss
from .moments import HighOrderMoments, cascaded_moments, sketched_moments
from .optimizer_groups import check_optimized, parameter_groups
from .reproducing_kernels import (
    ExponentialKernel,
    GaussianKernel,
    GaussianMixtureKernel,
    LaplaceKernel,
    PolynomialKernel,
    ReproducingKernel,
)
from .split_trunk import split_trunk
from .variance_attention import VarianceRegularizer, VEMAttention

if TYPE_CHECKING:
    from .rank_accuracy import RankAccuracyCalculator

__version__ = "0.1.0"

__all__ = [
    "AttentionEnsemble",
    "BinomialDevianceLoss",
    "CosineContrastiveLoss",
    "DenseNPairsLoss",
    "DistributedLoss",
    "DivergenceLoss",
    "EmbeddingHead",
    "EnergyConfusionRegularizer",
    "EnsembleLoss",
    "ExponentialKernel",
    "FeatureLoss",
    "FeatureTap",
    "GaussianKernel",
    "GaussianMixtureKernel",
    "HORDELoss",
    "HighOrderMoments",
    "IntraClassRegularizer",
    "JRDLoss",
    "JRSRegularizer",
    "LaplaceKernel",
    "MissingFeaturesError",
    "PolynomialKernel",
    "RankAccuracyCalculator",
    "ReproducingKernel",
    "VEMAttention",
    "VarianceRegularizer",
    "attach_all",
    "capture_loss_terms",
    "cascaded_moments",
    "check_optimized",
    "energy_confusion",
    "gradient_norm_ratios",
    "joint_kernel",
    "parameter_groups",
    "prepare_loss",
    "sketched_moments",
    "split_trunk",
]


def __getattr__(name: str) -> Any:
    # PML's accuracies import faiss and scikit-learn, which no loss needs.
    if name == "RankAccuracyCalculator":
        from .rank_accuracy import RankAccuracyCalculator

        return RankAccuracyCalculator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
