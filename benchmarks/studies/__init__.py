"""Many runs: planned from recipes, seeds, folds or a search, and run side by side or on Ray."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
