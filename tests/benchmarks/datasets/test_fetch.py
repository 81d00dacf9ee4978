"""A fetched file, or an unpacked archive, is complete and the expected one, or absent."""

import gc
import hashlib
import io
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.console import InUseError, alone
from benchmarks.datasets import fetch
from benchmarks.datasets.fetch import FetchError, fetch_file, unpack
from tests.support.server import serving

CONTENT = bytes(range(256)) * 5_000
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"

# pooch leaves the socket of a failed download to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch, "RETRIES", 0)
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


# ------------------------------------------------------------------------------------------ a file


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
    with pytest.raises(FetchError, match=rf"{message} from http.*; try again, or fetch"):
        fetch_file(server.url("file"), path, wrong)
    assert left(path) == []
    # One that lies there already is left alone, and nothing is asked for.
    path.write_bytes(CONTENT)
    with pytest.raises(FetchError, match=f"{message}; move it away, or fetch http"):
        fetch_file(server.url("file"), path, wrong)
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_a_broken_connection_is_tried_again_and_leaves_nothing(server, path, monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    server.hangs_up = 3
    with pytest.raises(FetchError, match=r"file: .*IncompleteRead.*; try again later, or fetch"):
        fetch_file(server.url("file"), path, SHA256)
    assert left(path) == []
    monkeypatch.setattr(fetch, "RETRIES", 2)
    fetch_file(server.url("file"), path, SHA256)
    assert len(server.requests) == 4
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (None, r"404 Client Error: File not found"),
        ("file:///etc/passwd", "No connection adapters"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(server, path, url, message):
    with pytest.raises(FetchError, match=rf"{message}.*; try again later, or fetch") as caught:
        fetch_file(url or server.url("none"), path, SHA256)
    assert "\n" not in str(caught.value)
    assert left(path) == []


def test_a_second_process_is_sent_away(server, path, tmp_path):
    path.parent.mkdir(parents=True)
    with alone(path):
        with pytest.raises(InUseError):
            fetch_file(server.url("file"), path, SHA256)
        with pytest.raises(InUseError):
            unpack(packed(tmp_path, ".zip", {"a": b"1"}), path)
    fetch_file(server.url("file"), path, SHA256)


# -------------------------------------------------------------------------------------- an archive


def packed(folder: Path, suffix: str, files: dict[str, bytes]) -> Path:
    archive = folder / f"archive{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            for name, content in files.items():
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    else:
        with tarfile.open(archive, "w:gz") as file:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return archive


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


EVERY = pytest.mark.parametrize("suffix", [".zip", ".tgz"])
FILES = {
    "a.txt": b"1",
    "b/c.txt": b"2" * 9_999,
    "b/d/ä ö.jpg": CONTENT,
    "Screenshot at 3.00.00\u202fPM.png": b"3",  # as macOS calls it
}


@EVERY
def test_an_archive_is_unpacked_to_a_new_folder(tmp_path, suffix):
    folder = tmp_path / "new" / "data" / "set"
    unpack(packed(tmp_path, suffix, FILES), folder)
    assert tree(folder) == FILES
    assert left(folder) == ["set"]
    with pytest.raises(OSError, match="Directory not empty"):
        unpack(packed(tmp_path, suffix, {"other": b""}), folder)
    assert tree(folder) == FILES


@EVERY
@pytest.mark.parametrize("name", ["../../x", "a/../../../x", "/tmp/x", "..\\x"])
def test_no_member_leads_out_of_the_folder(tmp_path, suffix, name):
    folder = tmp_path / "out" / "set"
    with suppress(FetchError):  # or what leads out is left out
        unpack(packed(tmp_path, suffix, {"a.txt": b"1", name: b"2"}), folder)
    assert all(path.resolve().is_relative_to(folder) for path in folder.rglob("*"))
    assert not (tmp_path / "x").exists()


@EVERY
def test_a_damaged_archive_is_refused(tmp_path, suffix):
    archive = packed(tmp_path, suffix, FILES)
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    folder = tmp_path / "out" / "set"
    with pytest.raises(FetchError, match=rf"^{archive}: cannot be unpacked .*, or fetch it again"):
        unpack(archive, folder)
    assert left(folder) == []
