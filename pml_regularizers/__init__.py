"""High-order regularizers for deep metric learning, as pytorch-metric-learning losses."""

from typing import TYPE_CHECKING, Any

from .attention_ensemble import AttentionEnsemble, between_heads, join_heads, split_heads
from .binomial_deviance import BinomialDevianceLoss
from .cosine_contrastive import CosineContrastiveLoss
from .dense_n_pairs import DenseNPairsLoss
from .distributed import DistributedLoss, gather_rows, prepare_loss
from .energy_confusion import EnergyConfusionRegularizer, energy_confusion
from .ensemble_loss import DivergenceLoss, EnsembleLoss
from .feature_loss import FeatureLoss, attach_all
from .feature_tap import Features, FeatureTap, MissingFeaturesError
from .generalization_bound import h_divergence, ideal_joint_error
from .gradient_ratios import TermLogger, gradient_norm_ratios, record_terms, term_names
from .heads import EmbeddingHead
from .horde import HORDELoss
from .joint_similarity import (
    IntraClassRegularizer,
    JIntraRegularizer,
    JMMDRegularizer,
    JRSRegularizer,
    between_class_similarity,
    intra_class_similarity,
    joint_intra,
    joint_kernel,
    joint_mmd,
)
from .jrd import JRDLoss, class_cosines
from .moments import HighOrderMoments, cascaded_moments, independent_moments, sketched_moments
from .optimizer_groups import parameter_groups, warn_untrained
from .reproducing_kernels import (
    ExponentialKernel,
    GaussianKernel,
    GaussianMixtureKernel,
    LaplaceKernel,
    LinearKernel,
    PolynomialKernel,
    ReproducingKernel,
)
from .scheduled_losses import CosineRamp, LinearRamp, ScheduledLosses
from .split_trunk import split_trunk
from .stratified_parts import Interval, mean_interval, over_parts, stratified_parts
from .variance_attention import VarianceRegularizer, VEMAttention, variance_gate, variance_loss

if TYPE_CHECKING:
    from .rank_accuracy import RankAccuracyCalculator

__version__ = "0.1.0"

__all__ = [
    "AttentionEnsemble",
    "BinomialDevianceLoss",
    "CosineContrastiveLoss",
    "CosineRamp",
    "DenseNPairsLoss",
    "DistributedLoss",
    "DivergenceLoss",
    "EmbeddingHead",
    "EnergyConfusionRegularizer",
    "EnsembleLoss",
    "ExponentialKernel",
    "FeatureLoss",
    "FeatureTap",
    "Features",
    "GaussianKernel",
    "GaussianMixtureKernel",
    "HORDELoss",
    "HighOrderMoments",
    "Interval",
    "IntraClassRegularizer",
    "JIntraRegularizer",
    "JMMDRegularizer",
    "JRDLoss",
    "JRSRegularizer",
    "LaplaceKernel",
    "LinearKernel",
    "LinearRamp",
    "MissingFeaturesError",
    "PolynomialKernel",
    "RankAccuracyCalculator",
    "ReproducingKernel",
    "ScheduledLosses",
    "TermLogger",
    "VEMAttention",
    "VarianceRegularizer",
    "attach_all",
    "between_class_similarity",
    "between_heads",
    "cascaded_moments",
    "class_cosines",
    "energy_confusion",
    "gather_rows",
    "gradient_norm_ratios",
    "h_divergence",
    "ideal_joint_error",
    "independent_moments",
    "intra_class_similarity",
    "join_heads",
    "joint_intra",
    "joint_kernel",
    "joint_mmd",
    "mean_interval",
    "over_parts",
    "parameter_groups",
    "prepare_loss",
    "record_terms",
    "sketched_moments",
    "split_heads",
    "split_trunk",
    "stratified_parts",
    "term_names",
    "variance_gate",
    "variance_loss",
    "warn_untrained",
]


def __getattr__(name: str) -> Any:
    # PML's accuracies import faiss and scikit-learn, which no loss needs.
    if name == "RankAccuracyCalculator":
        from .rank_accuracy import RankAccuracyCalculator

        return RankAccuracyCalculator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
