"""Builds the images, network, objective and optimizer of a run from its settings."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "class_paths": ["build", "resolved"],
        "images": ["Datasets", "build_datasets", "image_size", "show_to"],
        "network": [
            *("STARTING_WEIGHTS", "EmbeddingModel"),
            *("batch_norms", "build_model", "check_fetching"),
        ],
        "objective": ["build_loss", "build_optimizer"],
    },
)
