"""Export of a trained network, for use without this package."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={"writing": ["export"]},
)
