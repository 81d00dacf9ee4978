"""Fetches a file or unpacks an archive: the result is complete and checked, or absent.

The folder `.NAME.partial` beside NAME holds the work so far, and keeps a second process away. The next call removes
the remains of a killed process.

pooch fetches, and starts a broken download again. A file put there by other means (a browser, or `curl -C -`,
which resumes) is used once its checksum is right.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from benchmarks.console import PrintableError, alone, let_others_read, progress_bar, reason

CHUNK = 2**20  # bytes
RETRIES = 3


class FetchError(PrintableError, ValueError):
    """Error: a file cannot be fetched or unpacked; one line with its name, the fault and the remedy."""


def fetch_file(url: str, path: Path, checksum: str) -> None:
    """Fetch a file, unless it is already there with the right checksum.

    Args:
        url: An http or https address. Proxies are taken from the environment.
        path: Where the file goes; folders are created.
        checksum: "sha256:DIGEST" or another algorithm of `hashlib`; the digest's first digits are enough.

    Raises:
        FetchError: if the file cannot be fetched, or its checksum is wrong (one that was there already stays).
        InUseError: if another process is at work on it.
        OSError: if it cannot be written.
    """
    by_hand = f"fetch {url} with a browser or `curl -L -C -` to {path}"
    if path.exists():
        if problem := what_differs(path, checksum):
            raise FetchError(f"{path}: {problem}; move it away, or {by_hand}")
        return
    import pooch  # these take a while to import
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    # pooch sets the total, and takes a bar whose total is 0 or None for none.
    bar = progress_bar(total=1, desc=path.name, unit="B", unit_scale=True)
    with alone(path) as partial, bar:
        folder = pooch.create(
            path=partial,
            base_url="",
            registry={path.name: None},  # pooch cannot check a part of a checksum
            urls={path.name: url},
            retry_if_failed=RETRIES,
        )
        as_it_is = {"Accept-Encoding": "identity"}
        client = pooch.HTTPDownloader(bar, CHUNK, timeout=30, headers=as_it_is)
        try:
            come = Path(folder.fetch(path.name, downloader=client))
        except RequestException as error:
            raise FetchError(f"{url}: {error}; try again later, or {by_hand}") from error
        if problem := what_differs(come, checksum):
            raise FetchError(f"{path}: {problem} from {url}; try again, or {by_hand}")
        let_others_read(come)
        come.rename(path)


def what_differs(path: Path, checksum: str) -> str:
    """The file's fault, "expected sha256:12ab, got 34cd"; empty if it is the expected file."""
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found.startswith(expected):
        return ""
    return f"expected {checksum}, got {found[: len(expected)]}"


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or a tar, which `fetch_file` has checked, to a new folder.

    Raises:
        FetchError: if the archive cannot be unpacked.
        InUseError: if another process is at work on the folder.
        OSError: if the folder is there already.
    """
    # A .zip is unpacked safely anyway.
    options: Any = {} if archive.suffix == ".zip" else {"filter": "data"}
    with alone(folder) as partial:
        try:
            shutil.unpack_archive(archive, partial, **options)
        except Exception as error:  # damaged bytes make the standard library raise almost any error
            raise FetchError(
                f"{archive}: cannot be unpacked ({reason(error)}); make room if the disk is full, or fetch it again"
            ) from error
        partial.rename(folder)
