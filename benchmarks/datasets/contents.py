"""A look through image files: each is decoded and has two digests; of unchanged files, those of last time.

A size, times and a number of the file that are the same mean the same bytes: a file that is replaced has another
number or another time of change, which no program can set.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.console.writing import replace_file
from benchmarks.datasets.image_files import for_each, pixel_digest, read_image
from benchmarks.datasets.listing import DatasetError, Listing

YOUNG = 2e9
"""Nanoseconds: a file may change again within one tick of a file system's clock, so that nothing tells."""


class ImageDigests(NamedTuple):
    """Digests of an image: SHA-256 of its file's bytes, and one of its pixels, upright and in its box."""

    content: str
    pixels: str


@lru_cache(maxsize=1)  # a run asks for each of its splits
def listed_digests(listing: Listing) -> dict[int, ImageDigests]:
    """The digests of each listed image, by its row; a DatasetError names those that cannot be used."""
    digests, errors = image_digests(listing)
    if errors:
        raise listing.unusable(errors)
    return digests


def content_digest(listing: Listing) -> str:
    """SHA-256 of the listed paths and of the files' bytes: their sizes do not show a replaced image."""
    digest = hashlib.sha256()
    for row, file in listed_digests(listing).items():
        digest.update(f"{listing.paths[row]}\0{file.content}\n".encode())
    return digest.hexdigest()


def image_digests(
    listing: Listing, *, anew: bool = False
) -> tuple[dict[int, ImageDigests], dict[int, DatasetError]]:
    """The digests of the listed images, and why the others cannot be used; `anew`: read unchanged files, too."""
    kept_in = _kept_in(listing.root)
    before = _read(kept_in) if kept_in else {}
    kept: dict[str, list[int | str]] = {}

    def digest(row: int) -> ImageDigests | DatasetError:
        path = listing.root / listing.paths[row]
        box = None if listing.boxes is None else listing.boxes[row]
        key = listing.paths[row] if box is None else f"{listing.paths[row]} {box}"
        try:
            state = path.stat()
            facts = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
            known = [] if anew else before.get(key, [])
            if known[:-2] == facts:
                return ImageDigests(*map(str, known[-2:]))
            pixels = pixel_digest(read_image(path, upright=True, box=box))
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except (DatasetError, OSError) as error:
            return listing.wrong(row, error)
        if time.time_ns() - max(state.st_mtime_ns, state.st_ctime_ns) > YOUNG:
            kept[key] = [*facts, content, pixels]
        return ImageDigests(content, pixels)

    results = for_each(len(listing), digest, "look through")
    if kept_in and before != (kept := before | kept):
        with suppress(OSError):  # then it takes as long the next time
            kept_in.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept_in, json.dumps(kept).encode())
    digests, errors = {}, {}
    for row, result in enumerate(results):
        if isinstance(result, DatasetError):
            errors[row] = result
        else:
            digests[row] = result
    return digests, errors


def _kept_in(root: Path) -> Path | None:
    """A file in the user's folder of caches, if there is one: that of the images may be read-only."""
    # A path from here, as "~/.cache" without a home, is none (XDG base directory specification).
    bases = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")  # noqa: PTH111  never raises
    base = next(filter(os.path.isabs, bases), None)
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return Path(base, "pml-regularizers", f"{name}.json") if base else None


def _read(path: Path) -> dict[str, list[int | str]]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and all(isinstance(row, list) for row in content.values()):
            return content
    return {}
