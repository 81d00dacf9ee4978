"""High-order regularizers for deep metric learning, as pytorch-metric-learning losses."""

from .binomial_deviance import BinomialDevianceLoss
from .distributed import DistributedLoss, prepare_loss
from .features import FeatureLoss, Features, FeatureTap, MissingFeaturesError
from .heads import EmbeddingHead
from .horde import HORDELoss
from .moments import HighOrderMoments

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
    "prepare_loss",
]
