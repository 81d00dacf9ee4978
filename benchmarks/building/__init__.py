"""Builds the images, network, objective and optimizer of a run from its settings."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "class_paths": ["build", "parse_resolved", "resolved"],
        "images": ["Datasets", "build_datasets", "image_size"],
        "network": ["EmbeddingModel", "batch_norms", "build_model"],
        "objective": ["build_loss", "build_optimizer"],
    },
)
