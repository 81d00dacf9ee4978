from .published import (
    KNOWN_WEIGHTS as KNOWN_WEIGHTS,
    KnownWeights as KnownWeights,
)
from .weights import load_weights as load_weights

def register() -> None: ...
