from .published import (
    KNOWN_WEIGHTS as KNOWN_WEIGHTS,
    KnownWeights as KnownWeights,
)
from .weights import (
    can_be_fetched as can_be_fetched,
    load_weights as load_weights,
)

def register() -> None: ...
