from .hub import fetching as fetching
from .weights import load_weights as load_weights

def register() -> None: ...
