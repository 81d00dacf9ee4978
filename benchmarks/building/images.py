"""The images of an experiment: the dataset, the part to use, and the views of an image."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple

from timm.data import resolve_model_data_config
from torch import nn

from benchmarks.datasets import folder, table
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.listing import DatasetError, Listing
from benchmarks.datasets.queries import answerable, leaving_text
from benchmarks.datasets.transforms import ImageViews
from benchmarks.settings.data import VIEWS, Data
from benchmarks.settings.errors import ConfigError

GLYPHS_SIZE = 32


def image_size(data: Data, trunk: nn.Module) -> int:
    """Pixels per side of the image that the network sees."""
    if data.dataset == "glyphs":
        return data.image_size or GLYPHS_SIZE
    return data.image_size or int(resolve_model_data_config(trunk)["input_size"][-1])


class Datasets(NamedTuple):
    """Images of the classes to train on, to test on, and to choose weights by (protocol "fair")."""

    train: Glyphs | ImageSet
    test: Glyphs | ImageSet
    validation: Glyphs | ImageSet | None = None


def build_datasets(data: Data, *, seed: int = 0, fair: bool = False) -> Datasets:
    """Load the images of an experiment; photographs can be counted, but have no views before `show_to`.

    Args:
        seed: The run's seed, if it decides which classes are trained on.
        fair: Keep a part of the training classes to choose weights by.
    """
    limits = [limit for limit in (data.train_classes, data.max_classes) if limit is not None]
    with settings_named(data):
        make = _splits(data, seed, 0.5)
        whole = "all" if data.split == "all" else "train"
        train = make(
            split="development" if fair or data.split == "validation" else whole,
            max_classes=min(limits, default=None),
            draw_seed=seed if data.draw_classes else None,
        )
        splits = ["test", "validation"] if fair and data.split == "test" else [data.split]
        tested = {split: make(split=split, max_classes=data.max_classes) for split in splits}
        for split, images in {"train": train, **tested}.items():
            _check(data, images, split)
        return Datasets(train, tested[data.split], tested["validation"] if fair else None)


def build_tested(data: Data, *, seed: int = 0, default: float | None = None) -> Glyphs | ImageSet:
    """Load images to test on, as `build_datasets` does, and no others.

    Args:
        seed: The run's seed, if it decides which classes are trained on.
        default: Fraction of the classes, if neither the images nor the settings say which are tested; None: all.
    """
    with settings_named(data):
        images = _splits(data, seed, default)(split=data.split, max_classes=data.max_classes)
        _check(data, images, data.split)
        return images


def _splits(data: Data, seed: int, default: float | None) -> Callable[..., Glyphs | ImageSet]:
    """Makes a split of the images, given its name."""
    make: Callable[..., Glyphs | ImageSet]
    if data.dataset == "glyphs":
        size = data.image_size or GLYPHS_SIZE
        make = partial(Glyphs, data.root, image_size=size, stage=data.stage, seed=seed)
    else:
        make = partial(ImageSet, list_images(data, default))
    return partial(make, fold=data.fold, folds=data.folds)


def count_classes(data: Data) -> tuple[int, int, int]:
    """The classes of photographs to train on, all, and how many would give twice `data.folds` to train on."""
    with settings_named(data):
        listing = list_images(data, 0.5)
    names, need = sorted({*listing.classes}), 2 * data.folds
    both = zip(listing.classes, listing.parts, strict=True)
    trained = {name for name, part in both if part == "train"}
    fraction = data.test_classes if isinstance(data.test_classes, float) else 0.5
    needed = need + len(names) - len(trained)
    if {*names} - trained == folder.held_out(fraction, names):
        needed = next(n for n in count(need) if n - round(fraction * n) >= need)
    return len(trained), len(names), needed


def list_images(data: Data, default: float | None = None) -> Listing:
    """The photographs of a dataset; arguments and errors of `build_tested`, without the names of settings."""
    if data.dataset == "folder":
        chosen = default if data.test_classes is None else data.test_classes
        return folder.read(data.root, chosen, data.class_level)
    if data.dataset != "table":
        return IMAGE_DATASETS[data.dataset].load(data.root, fetch=bool(data.download))
    assert data.table is not None
    return table.read(
        *(data.table, data.root, data.test_classes),
        known_classes=bool(data.known_classes),
        camera=data.camera,
        sequence=data.sequence,
        default=default,
    )


@contextmanager
def settings_named(data: Data) -> Iterator[None]:
    """Name, in a ConfigError, the setting that an error is about."""
    try:
        yield
    except ConfigError:
        raise
    except DatasetError as error:
        setting = "data.root" if data.table is None else "data.table"
        raise ConfigError(f"{setting}: {error}") from error
    except OSError as error:
        raise ConfigError(f"data.root: {data.root}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"data.{error}") from error


def show_to(trunk: nn.Module, datasets: Datasets, data: Data) -> Datasets:
    """Give photographs the size and the normalisation of a network."""
    for dataset in datasets:
        if isinstance(dataset, ImageSet):
            dataset.views = image_views(data, trunk)
    return datasets


def _check(data: Data, images: Glyphs | ImageSet, split: str) -> None:
    """Raise a DatasetError if a split has one class alone, or has nothing to retrieve where it is tested on."""
    place, ranking = data.table or data.root, images.ranking
    if images.num_classes < 2:
        use = "train" if split == "train" else "test"
        are = "are of one class" if len(images) else "are missing"
        known = ""
        if isinstance(images, ImageSet):
            known = f"you have {len({*images.listing.classes}):,} classes, and "
        raise DatasetError(
            f"{place}: {known}all images to {use} on {are}; two or more are needed to test on, and for a training "
            "as many to train on"
        )
    if split == "train":
        return
    if answerable(images.labels, ranking).any():
        if ranking is not None and not ranking.wrong(images.labels)[ranking.queries].any():
            leaving = leaving_text(data.camera, data.sequence)
            raise DatasetError(
                f"{place}: {leaving}, so that no query has one of another class in its ranking; take another column"
            )
        return
    if ranking is not None and ranking.queries.any():
        told, remedy = "is in the gallery", "give classes both queries and gallery images"
        if leaving := leaving_text(data.camera, data.sequence):
            told = f"has a gallery image left ({leaving})"
            remedy = "take more images, or another column"
        raise DatasetError(
            f"{place}: no query's class {told}, so that none of {int(ranking.queries.sum()):,} queries has "
            f"anything to find; {remedy}"
        )
    kind = "validation" if split == "validation" else "test"
    raise DatasetError(
        f"{place}: no {kind} class has two images, one to search with and one to find; take more classes or images"
    )


def image_views(data: Data, trunk: nn.Module) -> ImageViews:
    """Views of photographs as a network needs them."""
    config = resolve_model_data_config(trunk)
    usual = {
        "interpolation": config["interpolation"],
        "keep_aspect": config["crop_mode"] != "squash",
    }
    given = {name: value for name in VIEWS if (value := getattr(data, name)) is not None}
    size, mean, std = image_size(data, trunk), config["mean"], config["std"]
    try:
        return ImageViews(image_size=size, mean=mean, std=std, **usual | given)
    except ValueError as error:
        raise ConfigError(f"data.{error}") from error
