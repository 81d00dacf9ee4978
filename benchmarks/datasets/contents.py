"""A look through image files: each is decoded and has two digests; of unchanged files, those of last time.

A size, times and a number of the file that are the same mean the same bytes: a file that is replaced has another
number or another time of change, which no program can set.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import joblib
from PIL import Image

from benchmarks.console import progress_bar, replace_file
from benchmarks.datasets.image_files import pixel_digest, read_image
from benchmarks.datasets.listing import Box, DatasetError, reading

YOUNG = 2e9
"""Nanoseconds: a file may change again within one tick of a file system's clock, so that nothing tells."""


class ImageDigests(NamedTuple):
    """Hexadecimal digests of an image file: SHA-256 of its bytes, and one of its pixels, upright."""

    content: str
    pixels: str


def file_digests(
    root: Path, paths: Sequence[str], boxes: Sequence[Box | None] | None = None
) -> list[ImageDigests]:
    """The digests of each image file below a folder, of its pixels those in its box.

    Raises:
        DatasetError: if some cannot be read as images; it counts them and names the first.
    """
    kept_in = _kept_in(root)
    before = _read(kept_in)
    kept: dict[str, list[int | str]] = {}

    def digest(row: tuple[str, Box | None]) -> ImageDigests | DatasetError:
        try:
            return digest_of(*row)
        except DatasetError as error:
            return error

    def digest_of(path: str, box: Box | None) -> ImageDigests:
        key = path if box is None else f"{path} {box}"
        with reading(root / path):
            facts = _facts(found := (root / path).stat())
            same = before.get(key, [])
            if same[: len(facts)] == facts and len(same) == len(facts) + 2:  # one, of older code
                result = ImageDigests(*map(str, same[len(facts) :]))
            else:
                pixels = pixel_digest(read_image(root / path, upright=True, box=box))
                with (root / path).open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                result = ImageDigests(content, pixels)
        if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > YOUNG:
            kept[key] = [*facts, *result]
        return result

    Image.init()  # opening an image loads them, which is not thread-safe
    with ThreadPool(joblib.cpu_count()) as pool:  # decoding and hashing hold no lock
        rows = zip(paths, boxes or [None] * len(paths), strict=True)
        tasks = pool.imap(digest, rows, chunksize=16)
        bar = progress_bar(tasks, total=len(paths), desc="look through", unit="image", leave=False)
        found = list(bar)
    if before != (kept := before | kept):
        with suppress(OSError):  # then it takes as long the next time
            kept_in.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept_in, json.dumps(kept).encode())
    broken = [error for error in found if isinstance(error, DatasetError)]
    if broken:
        more = f", and {len(broken) - 1:,} more cannot be read" if broken[1:] else ""
        raise DatasetError(f"{broken[0]}{more}")
    return found


def _facts(found: os.stat_result) -> list[int | str]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _kept_in(root: Path) -> Path:
    """A file in the user's folder of caches: that of the images may be read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  never raises
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return Path(base, "pml-regularizers", f"{name}.json")


def _read(path: Path) -> dict[str, list[int | str]]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and all(isinstance(of, list) for of in content.values()):
            return content
    return {}
