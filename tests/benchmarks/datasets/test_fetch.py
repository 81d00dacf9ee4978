"""A fetched file is complete and the expected one, or absent."""

import gc
import hashlib
from pathlib import Path

import pytest

from benchmarks.console import PrintableError
from benchmarks.datasets.fetch import fetch_file
from tests.support.server import serving

CONTENT = bytes(range(256)) * 5_000
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"

# pooch leaves the socket of a failed download to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "file").write_bytes(CONTENT)
    with serving(folder) as server:
        yield server
    gc.collect()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "folder" / "file"


def left(path: Path) -> list[str]:
    """Files that are left."""
    return sorted(each.name for each in path.parent.iterdir())


@pytest.mark.parametrize(
    "checksum", [SHA256, SHA256[:15], f"sha1:{hashlib.sha1(CONTENT).hexdigest()}"]
)
def test_a_file_is_fetched_once(server, path, checksum):
    for _ in range(2):
        fetch_file(server.url("file"), path, checksum)
        assert path.read_bytes() == CONTENT
        assert left(path) == ["file"]
    assert server.requests == ["/file"]


def test_another_file_than_the_expected_one_is_refused(server, path):
    wrong = f"sha256:{64 * '0'}"
    message = f"{path}: expected {wrong}, got {SHA256[7:]}"
    with pytest.raises(PrintableError, match=rf"{message}; try again, or fetch http"):
        fetch_file(server.url("file"), path, wrong)
    assert left(path) == []
    # One that lies there already is left alone, and nothing is asked for.
    path.write_bytes(CONTENT)
    with pytest.raises(PrintableError, match=f"{message}; move it away, or fetch http"):
        fetch_file(server.url("file"), path, wrong)
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_a_broken_connection_leaves_nothing(server, path):
    server.hangs_up = 1
    with pytest.raises(
        PrintableError, match=r"file: .*IncompleteRead.*; try again later, or fetch"
    ):
        fetch_file(server.url("file"), path, SHA256)
    assert left(path) == []
    fetch_file(server.url("file"), path, SHA256)
    assert path.read_bytes() == CONTENT


def test_what_cannot_be_fetched_is_one_line(server, path):
    message = r"404 Client Error: File not found.*; try again later, or fetch"
    with pytest.raises(PrintableError, match=message) as caught:
        fetch_file(server.url("none"), path, SHA256)
    assert "\n" not in str(caught.value)
    assert left(path) == []
