"""High-order regularizers for deep metric learning, as pytorch-metric-learning losses."""

from .binomial_deviance import BinomialDevianceLoss
from .distributed import DistributedLoss, gather_rows, prepare_loss
from .features import FeatureLoss, Features, FeatureTap, MissingFeaturesError
from .heads import EmbeddingHead
from .horde import HORDELoss
from .moments import HighOrderMoments, cascaded_moments, independent_moments

__version__ = "0.1.0"

__all__ = [
    "BinomialDevianceLoss",
    "DistributedLoss",
    "EmbeddingHead",
    "FeatureLoss",
    "FeatureTap",
    "Features",
    "HORDELoss",
    "HighOrderMoments",
    "MissingFeaturesError",
    "cascaded_moments",
    "gather_rows",
    "independent_moments",
    "prepare_loss",
]
