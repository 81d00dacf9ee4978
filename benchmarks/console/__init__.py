"""Parts that all commands share: progress bars, arguments, stopping, and files that are complete or absent."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
