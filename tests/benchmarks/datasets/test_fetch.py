"""A fetched file, or an unpacked archive, is complete and the expected one, or absent."""

import errno
import hashlib
import io
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from benchmarks.datasets import fetch
from benchmarks.datasets.fetch import FetchError, fetch_file, unpack
from tests.support.server import serving

CONTENT = bytes(range(256)) * 5_000
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch, "RETRIES", 0)
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "file").write_bytes(CONTENT)
    with serving(folder) as server:
        yield server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "folder" / "file"


def left(path: Path) -> list[str]:
    """Files that are left, except the lock."""
    return sorted(each.name for each in path.parent.iterdir() if each.name != f".{path.name}.lock")


# ------------------------------------------------------------------------------------------ a file


@pytest.mark.parametrize(
    "checksum", [SHA256, SHA256[:15], f"sha1:{hashlib.sha1(CONTENT).hexdigest()}"]
)
def test_a_file_is_fetched_once(server, path, checksum):
    for _ in range(2):
        fetch_file(server.url("file"), path, checksum, len(CONTENT))
        assert path.read_bytes() == CONTENT
        assert left(path) == ["file"]
    assert server.requests == ["/file"]


@pytest.mark.parametrize(
    ("checksum", "size", "message"),
    [
        (f"sha256:{64 * '0'}", None, f"expected sha256:{64 * '0'}, got {SHA256[7:]}"),
        (SHA256, len(CONTENT) + 1, "expected 1280001 bytes, got 1280000"),
    ],
)
def test_another_file_than_the_expected_one_is_refused(server, path, checksum, size, message):
    with pytest.raises(FetchError, match=f"{path}: {message}.* from http.*; try again, or fetch"):
        fetch_file(server.url("file"), path, checksum, size)
    assert left(path) == []
    # One that lies there already is left alone, and nothing is asked for.
    path.write_bytes(CONTENT)
    with pytest.raises(FetchError, match=f"{path}: {message}; move it away, or fetch http"):
        fetch_file(server.url("file"), path, checksum, size)
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 1


@pytest.mark.parametrize("checksum", ["sha256:", SHA256[:14], ""])
def test_nothing_unchecked_is_fetched(server, path, checksum):
    with pytest.raises(FetchError, match=f"checksum of 8 digits or more, got '{checksum}'"):
        fetch_file(server.url("file"), path, checksum)
    assert not server.requests


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
        ("http://127.0.0.1:1/file", "Connection refused"),
        ("file:///etc/passwd", "No connection adapters"),
    ],
)
# urllib3 leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
def test_what_cannot_be_fetched_is_one_line(server, path, url, message):
    with pytest.raises(FetchError, match=f"{message}.*; try again later, or fetch") as caught:
        fetch_file(url or server.url("none"), path, SHA256)
    assert "\n" not in str(caught.value)
    assert left(path) == []


@pytest.mark.parametrize("known", [True, False], ids=["before", "on the way"])
def test_a_full_disk_is_told(server, path, monkeypatch, known):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if known:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_279_999))
    else:
        monkeypatch.setattr("pooch.HTTPDownloader.__call__", full)
    with pytest.raises(FetchError, match=rf"{path}: the disk is full, [\d,]+ bytes are free; make"):
        fetch_file(server.url("file"), path, SHA256, len(CONTENT) if known else None)
    assert not server.requests
    assert left(path) == []


def test_what_a_killed_process_left_is_removed(server, path, tmp_path):
    archive = packed(tmp_path, ".zip", {"a": b"1"})
    for target in (path, path.with_name("folder")):
        partial = target.with_name(f".{target.name}.partial")
        (partial / "some" / "of").mkdir(parents=True)
        (partial / "some" / "file").write_text("half of")
    fetch_file(server.url("file"), path, SHA256)
    unpack(archive, path.with_name("folder"))
    assert tree(path.with_name("folder")) == {"a": b"1"}
    assert [name for name in left(path) if "lock" not in name] == ["file", "folder"]


def test_a_second_process_is_sent_away(server, path, tmp_path):
    path.parent.mkdir(parents=True)
    with FileLock(path.with_name(".file.lock")):
        with pytest.raises(FetchError, match=f"{path}: another process is at work on it; wait"):
            fetch_file(server.url("file"), path, SHA256)
        with pytest.raises(FetchError, match=f"{path}: another process is at work on it; wait"):
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
        with tarfile.open(archive, "w" if suffix == ".tar" else "w:gz") as file:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return archive


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


EVERY = pytest.mark.parametrize("suffix", [".zip", ".tar", ".tgz", ".tar.gz"])
BOTH = pytest.mark.parametrize("suffix", [".zip", ".tar"])
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
    with pytest.raises(FetchError, match=f"{folder}: already exists; move it away"):
        unpack(packed(tmp_path, suffix, {"other": b""}), folder)
    assert tree(folder) == FILES


def assert_refused(archive: Path, message: str) -> None:
    folder = archive.parent / "out" / "set"
    with pytest.raises(FetchError, match=message) as caught:
        unpack(archive, folder)
    assert str(archive) in str(caught.value) or str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert left(folder) == []
    assert not (archive.parent / "x").exists()


@BOTH
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../x", "'../../x' leads out of the folder; get another archive"),
        ("a/../../../x", "leads out"),
        ("/tmp/x", "leads out"),
        ("..\\x", "leads out"),
        ("C:x", "leads out"),
        ("", "'' is no usable name; get another archive"),
        ("a\nb", r"'a\\nb' is no usable name"),
        ("a\u2028b", r"'a\\u2028b' is no usable name"),
        ("a\u202eb", r"'a\\u202eb' is no usable name"),
        ("d/" * 1_000 + "x", "is no usable name"),
        ("x" * 256, "is no usable name"),
    ],
)
def test_a_member_with_such_a_name_is_refused(tmp_path, suffix, name, message):
    assert_refused(packed(tmp_path, suffix, {"a.txt": b"1", name: b"2"}), message)


@BOTH
def test_a_link_out_of_the_folder_is_refused(tmp_path, suffix):
    archive = tmp_path / f"archive{suffix}"
    if suffix == ".zip":
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(link, "../..")
    else:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "../.."
        with tarfile.open(archive, "w") as file:
            file.addfile(link)
    assert_refused(archive, "link")


@EVERY
@pytest.mark.parametrize(
    "change",
    [
        lambda whole: b"",
        lambda whole: b"<html>Quota exceeded</html>" * 99,
        lambda whole: whole[: len(whole) // 2],
    ],
    ids=["empty", "a page", "half"],
)
def test_a_damaged_archive_is_refused(tmp_path, suffix, change):
    archive = packed(tmp_path, suffix, FILES)
    archive.write_bytes(change(archive.read_bytes()))
    assert_refused(archive, "cannot be unpacked .*; fetch it again")


@EVERY
def test_an_archive_of_nothing_is_refused(tmp_path, suffix):
    assert_refused(packed(tmp_path, suffix, {}), "holds no files; fetch it again")


@BOTH
@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a", "."), ("ä" * 200,)])
def test_members_that_no_folder_can_hold_are_refused(tmp_path, suffix, names):
    archive = packed(tmp_path, suffix, dict.fromkeys(names, b"1"))
    assert_refused(archive, f"^{archive}: cannot be unpacked .*; fetch it again")


def test_a_zip_for_which_there_is_no_room_is_refused(tmp_path, monkeypatch):
    archive = packed(tmp_path, ".zip", {"zeros": bytes(10**6), "more": bytes(10**6)})
    assert archive.stat().st_size < 10_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 10**6 - 1))
    monkeypatch.setattr(zipfile.ZipFile, "extract", None)
    assert_refused(archive, "the disk is full, 1,999,999 bytes are free; make room")


def test_permissions_of_a_tar_are_not_taken_over(tmp_path):
    member = tarfile.TarInfo("tool")
    member.mode = 0o6777
    with tarfile.open(tmp_path / "archive.tar", "w") as file:
        file.addfile(member)
    unpack(tmp_path / "archive.tar", tmp_path / "set")
    assert not (tmp_path / "set" / "tool").stat().st_mode & 0o6022
