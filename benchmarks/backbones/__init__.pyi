from .published import KnownWeights as KnownWeights
from .weights import load_weights as load_weights

def register() -> None: ...
