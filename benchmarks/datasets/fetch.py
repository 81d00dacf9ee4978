"""Fetches a file with pooch, and checks it."""

import hashlib
from pathlib import Path

from benchmarks.console import PrintableError, let_others_read


def fetch_file(url: str, path: Path, checksum: str) -> None:
    """Fetch a file, unless it is already there with the right checksum.

    Args:
        url: An http or https address. Proxies are taken from the environment.
        path: Where the file goes; folders are created.
        checksum: "sha256:DIGEST", or another algorithm of `hashlib`.

    Raises:
        PrintableError: if the file cannot be fetched, or its checksum is wrong (one that was there already stays).
        OSError: if it cannot be written.
    """
    import pooch  # these take a while to import
    from requests import RequestException

    by_hand = f"fetch {url} with a browser or `curl -L -C -` to {path}"
    if path.exists():
        if problem := what_differs(path, checksum):
            raise PrintableError(f"{path}: {problem}; move it away, or {by_hand}")
        return
    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(url, None, path.name, path.parent, progressbar=True)
    except RequestException as error:
        raise PrintableError(f"{url}: {error}; try again later, or {by_hand}") from error
    if problem := what_differs(path, checksum):
        path.unlink()
        raise PrintableError(f"{path}: {problem}; try again, or {by_hand}")
    let_others_read(path)


def what_differs(path: Path, checksum: str) -> str:
    """The file's fault, "expected sha256:12ab, got 34cd"; empty if it is the expected file."""
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found.startswith(expected):
        return ""
    return f"expected {checksum}, got {found[: len(expected)]}"
