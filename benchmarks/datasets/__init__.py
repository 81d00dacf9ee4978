"""Datasets for training and testing, one file each; a name is imported when it is first used."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submodules={"folder"},
    submod_attrs={
        "catalogue": ["IMAGE_DATASETS", "Augmentation", "DatasetName", "Interpolation"],
        "fetch": ["FetchError", "fetch_file", "what_differs"],
        "glyphs": ["Glyphs"],
        "images": ["ImageSet"],
        "listing": ["DatasetError", "DatasetInfo", "Listing", "load"],
        "splits": ["Split", "Stage", "validation_fold"],
        "transforms": ["CROP_FRACTION", "ImageViews"],
    },
)
