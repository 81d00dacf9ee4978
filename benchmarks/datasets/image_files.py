"""Image files: which files are images, and how their pixels are read, by every part that reads any."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TypeVar

import joblib
import numpy as np
from PIL import Image, ImageOps

from benchmarks.console.printing import progress_bar
from benchmarks.datasets.listing import Box, DatasetError, reading

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF")
"""Formats to open files as, whatever their names; otherwise Pillow would hand PostScript to Ghostscript."""


@cache
def suffixes() -> tuple[str, ...]:
    """Ends of the names of images, in lower case."""
    return tuple(end for end, kind in Image.registered_extensions().items() if kind in FORMATS)


def walk(root: Path) -> Iterator[tuple[Path, list[str], list[str], list[str]]]:
    """Each folder from the root down, its folders, its images and its other files, by name.

    Links are followed; hidden files and folders are left out.

    Raises:
        OSError: if a folder cannot be listed, or is a link to a folder around it, which has no end.
    """

    def stop(error: OSError) -> None:
        raise error

    for folder, inner, files in os.walk(root, onerror=stop, followlinks=True):
        inner[:] = sorted(name for name in inner if name[0] != ".")
        for link in (Path(folder, name) for name in inner):
            depth = len(link.relative_to(root).parts)
            passed = [above.resolve() for above in list(link.parents)[:depth] if link.is_symlink()]
            if any(above.is_relative_to(link.resolve()) for above in passed):
                raise OSError(errno.ELOOP, "a link to a folder around it; remove it", f"{link}")
        shown = sorted(name for name in files if name[0] != ".")
        images = [name for name in shown if name.lower().endswith(suffixes())]
        yield Path(folder), inner, images, [name for name in shown if name not in {*images}]


T = TypeVar("T")


def for_each(images: int, read: Callable[[int], T], told: str) -> list[T]:
    """The results of a function for each image, in threads, since decoding and hashing hold no lock."""
    Image.init()  # opening an image loads them, which is not thread-safe
    with ThreadPool(joblib.cpu_count()) as pool:
        tasks = pool.imap(read, range(images), chunksize=16)
        return [*progress_bar(tasks, total=images, desc=told, unit="image", leave=False)]


def pixel_digest(image: Image.Image) -> str:
    """A digest, in hexadecimal, of an image's size and pixels, whatever its file."""
    digest = hashlib.blake2b(f"{image.mode} {image.size} ".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def _opened(path: Path) -> Image.Image:
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise ValueError("it is no regular file")
    return Image.open(path, formats=FORMATS)


def read_image(path: Path, *, upright: bool = False, box: Box | None = None) -> Image.Image:
    """Read an image file as RGB.

    Transparency is ignored. Of several frames the first is read; 16 bits are cut to the upper 8.

    Args:
        upright: Turn the image as its EXIF orientation says; by default its pixels stay as stored, as in PML's and
            torchvision's datasets. Pillow itself turns TIFF files.
        box: Part of the image, once it is turned, to cut out; what of it lies outside is left out.

    Raises:
        DatasetError: if there is no such file, its format is not in `FORMATS`, it has too many pixels, it cannot
            be decoded to its end, or the box lies outside.
    """
    with reading(path), _opened(path) as file:
        image: Image.Image = file
        # Pillow would clip 16 bits to white; those of a PGM file it scales to 65,535.
        if file.mode.startswith("I;16") or (file.mode, file.format) == ("I", "PPM"):
            image = Image.fromarray((np.asarray(file) >> 8).astype(np.uint8))
            image.info = file.info
        elif file.mode in ("I", "F"):
            raise ValueError(f"the mode {file.mode} does not define which value is white")
        image.load()
        # Invisible pixels have a colour, too; Pillow would warn of it.
        image.info.pop("transparency", None)
        image = image.convert("RGB")
    if upright:
        with suppress(Exception):  # damage in other EXIF data shows only after the turn
            ImageOps.exif_transpose(image, in_place=True)
    if box is None:
        return image
    left, top = max(box[0], 0), max(box[1], 0)
    right, bottom = min(box[2], image.width), min(box[3], image.height)
    if left < right and top < bottom:
        return image.crop((left, top, right, bottom))
    raise DatasetError(
        f"{path}: the box {box} (left, top, right, bottom) lies outside of its {image.width} x {image.height} "
        "pixels; correct it"
    )
