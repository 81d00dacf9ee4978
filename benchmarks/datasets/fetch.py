"""Fetches a file or unpacks an archive: the result is complete and checked, or absent.

The folder `.NAME.partial` beside NAME holds the work so far, and keeps a second process away. The next call removes
the remains of a killed process.

pooch fetches, and starts a broken download again. A file put there by other means (a browser, or `curl -C -`,
which resumes) is used once its checksum is right.
"""

import errno
import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.console import (
    InUseError,
    PrintableError,
    alone,
    let_others_read,
    progress_bar,
    reason,
)

CHUNK = 2**20  # bytes
RETRIES = 3


class FetchError(PrintableError, ValueError):
    """Error: a file cannot be fetched or unpacked; one line with its name, the fault and the remedy."""


def fetch_file(url: str, path: Path, checksum: str, size: int | None = None) -> None:
    """Fetch a file, unless it is already there with the right checksum.

    Args:
        url: An http or https address. Proxies are taken from the environment.
        path: Where the file goes; folders are created.
        checksum: "sha256:DIGEST" or another algorithm of `hashlib`; the digest's first digits are enough.
        size: Expected bytes.

    Raises:
        FetchError: if the file cannot be fetched, or its checksum is wrong (a wrong file that was already there
            stays); if the disk is full, or another process is at work on it.
    """
    by_hand = f"fetch {url} with a browser or `curl -L -C -` to {path}"
    if path.exists():
        if problem := what_differs(path, checksum, size):
            raise FetchError(f"{path}: {problem}; move it away, or {by_hand}")
        return
    with _writing(path) as partial:
        if size is not None and size > shutil.disk_usage(partial).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        come = _download(url, partial / path.name, size or 1, by_hand)
        if problem := what_differs(come, checksum, size):
            raise FetchError(f"{path}: {problem} from {url}; try again, or {by_hand}")
        let_others_read(come)
        come.rename(path)


def _download(url: str, path: Path, size: int, by_hand: str) -> Path:
    import pooch  # these take a while to import
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    folder = pooch.create(
        path=path.parent,
        base_url="",
        registry={path.name: None},  # pooch cannot check a part of a checksum
        urls={path.name: url},
        retry_if_failed=RETRIES,
    )
    with progress_bar(total=size, desc=path.name, unit="B", unit_scale=True) as bar:
        as_it_is = {"Accept-Encoding": "identity"}
        client = pooch.HTTPDownloader(bar, CHUNK, timeout=30, headers=as_it_is)
        try:
            return Path(folder.fetch(path.name, downloader=client))
        except RequestException as error:
            raise FetchError(f"{url}: {error}; try again later, or {by_hand}") from error


def what_differs(path: Path, checksum: str, size: int | None = None) -> str:
    """The file's fault, such as "expected 15 bytes, got 14"; empty if it is the expected file."""
    algorithm, _, expected = checksum.partition(":")
    if size is not None and path.stat().st_size != size:
        return f"expected {size} bytes, got {path.stat().st_size}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found.startswith(expected):
        return ""
    return f"expected {checksum}, got {found[: len(expected)]}"


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or a tar, which `fetch_file` has checked, to a new folder.

    Raises:
        FetchError: if the archive cannot be unpacked, or another process is at work on the folder.
    """
    with _writing(folder) as partial:
        try:
            (_unzip if archive.suffix == ".zip" else _untar)(archive, partial)
        except Exception as error:  # damaged bytes make the standard library raise almost any error
            raise FetchError(
                f"{archive}: cannot be unpacked ({reason(error)}); make room if the disk is full, or fetch it again"
            ) from error
        partial.rename(folder)


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        for member in progress_bar(file.infolist(), desc=archive.name, unit="file"):
            file.extract(member, folder)  # inside the folder, whatever its name


def _untar(archive: Path, folder: Path) -> None:
    def counted(member: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
        bar.update()
        return tarfile.data_filter(member, where)

    with tarfile.open(archive) as file, progress_bar(desc=archive.name, unit="file") as bar:
        file.extractall(folder, filter=counted)


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """Like `alone`, but raises FetchErrors."""
    try:
        with alone(target) as partial:
            yield partial
    except InUseError as error:
        raise FetchError(f"{target}: another process is at work on it; wait for it") from error
    except OSError as error:
        raise FetchError(f"{target}: {error.strerror or error}") from error
