"""Fetches a file or unpacks an archive: the result is complete and checked, or absent.

Two things may lie beside NAME: `.NAME.lock`, which keeps a second process away, and the folder `.NAME.partial`,
with the work so far. The next call removes the remains of a killed process.

pooch fetches, and starts a broken download again. A file put there by other means (a browser, or `curl -C -`,
which resumes) is used once its checksum is right.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.console import PrintableError, alone, is_plain, progress_bar, reason

CHUNK = 2**20  # bytes
RETRIES = 3
DIGITS = 8  # of a checksum, at least: some are published only in part
LONGEST = 255  # letters of a member's name, folders included
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of the system, not of an archive."""


class FetchError(PrintableError, ValueError):
    """Error: a file cannot be fetched or unpacked; one line with its name, the fault and the remedy."""


def fetch_file(url: str, path: Path, checksum: str, size: int | None = None) -> None:
    """Fetch a file, unless it is already there with the right checksum.

    Args:
        url: An http or https address. Proxies are taken from the environment.
        path: Where the file goes; folders are created.
        checksum: "sha256:DIGEST" or another algorithm of `hashlib`; the digest's first 8 digits may be enough.
        size: Expected bytes.

    Raises:
        FetchError: if the file cannot be fetched, or its checksum is wrong (a wrong file that was already there
            stays); if the disk is full, or another process is at work on it.
    """
    if len(checksum.partition(":")[2]) < DIGITS:
        raise FetchError(f"{url}: expected a checksum of {DIGITS} digits or more, got {checksum!r}")
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
        FetchError: if the archive is damaged or empty, or a member may lead out of the folder; if `folder`
            exists, the disk is full, or another process is at work on it.
    """
    with _writing(folder) as partial:
        if os.path.lexists(folder):
            raise FetchError(f"{folder}: already exists; move it away")
        try:
            (_unzip if archive.suffix == ".zip" else _untar)(archive, partial)
        except FetchError:
            raise
        except Exception as error:  # damaged bytes make the standard library raise almost any error
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                raise
            why = f"{type(error).__name__}: {reason(error)}"
            raise FetchError(f"{archive}: cannot be unpacked ({why}); fetch it again") from error
        if not any(partial.iterdir()):
            raise FetchError(f"{archive}: holds no files; fetch it again")
        partial.rename(folder)


def _untar(archive: Path, folder: Path) -> None:
    def checked(member: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
        bar.update()
        _check_name(archive, member.name)
        return tarfile.data_filter(member, where)

    with tarfile.open(archive) as file, progress_bar(desc=archive.name, unit="file") as bar:
        file.extractall(folder, filter=checked)


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        for member in members:
            _check_name(archive, member.filename)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise FetchError(f"{archive}: {member.filename} is a link; get another archive")
        if sum(member.file_size for member in members) > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for member in progress_bar(members, desc=archive.name, unit="file"):
            file.extract(member, folder)  # at most file_size bytes of it


def _check_name(archive: Path, name: str) -> None:
    leads_out = name.startswith("/") or ".." in name.split("/") or re.match(r"[A-Za-z]:|.*\\", name)
    usable = name.strip("/") and is_plain(name) and len(name) <= LONGEST
    if leads_out or not usable:
        why = "leads out of the folder" if leads_out else "is no usable name"
        raise FetchError(f"{archive}: {name[:60]!r} {why}; get another archive")


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """Like `alone`, but raises FetchErrors."""
    from filelock import Timeout

    try:
        with alone(target) as partial:
            yield partial
    except Timeout as error:
        raise FetchError(f"{target}: another process is at work on it; wait for it") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            raise FetchError(
                f"{target}: the disk is full, {free:,} bytes are free; make room and try again"
            ) from error
        raise FetchError(f"{error.filename or target}: {error.strerror or error}") from error
