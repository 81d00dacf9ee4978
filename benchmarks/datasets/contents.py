"""SHA-256 of image files; of files that did not change, those of the last time.

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

import joblib

from benchmarks.console import progress_bar, replace_file
from benchmarks.datasets.listing import reading

YOUNG = 2e9
"""Nanoseconds: a file may change again within one tick of a file system's clock, so that nothing tells."""


def file_digests(root: Path, paths: Sequence[str]) -> list[str]:
    """SHA-256 of the bytes of each file below a folder.

    Raises:
        DatasetError: if a file cannot be read.
    """
    kept_in = _kept_in(root)
    before = _read(kept_in)
    kept: dict[str, list[int | str]] = {}

    def digest(path: str) -> str:
        with reading(root / path):
            facts = _facts(found := (root / path).stat())
            same = before.get(path, [])
            if same[:-1] == facts:
                result = str(same[-1])
            else:
                with (root / path).open("rb") as file:
                    result = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > YOUNG:
            kept[path] = [*facts, result]
        return result

    with ThreadPool(joblib.cpu_count()) as pool:  # hashing holds no lock
        tasks = pool.imap(digest, paths, chunksize=16)
        bar = progress_bar(tasks, total=len(paths), desc="look through", unit="image", leave=False)
        found = list(bar)
    if before != (kept := before | kept):
        with suppress(OSError):  # then it takes as long the next time
            kept_in.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept_in, json.dumps(kept).encode())
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
