"""The training loop and its state."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "batches": ["StepSampler", "training_loader"],
        "cached_views": ["ViewCache"],
        "loop": ["Trainer"],
        "state": ["TrainingState"],
        "trial": ["build_parts", "find_horde", "start", "try_one_step"],
    },
)
