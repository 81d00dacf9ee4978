"""A bundle for a machine without a network: what is made there arrives here, or one line says why not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import offline_bundle


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    command = ["git", "-C", str(folder), *named, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits that takes the project's place, for a machine that has all packages."""
    root = tmp_path / "project"
    (root / "code").mkdir(parents=True)
    git(tmp_path, "init", "-q", str(root))
    for number in range(2):
        (root / "code" / "file.py").write_text(f"{number}\n" * 100)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", f"{number}")
    monkeypatch.setattr(offline_bundle, "ROOT", root)
    monkeypatch.setattr(offline_bundle, "fetch_wheels", lambda folder, *_: folder.mkdir())
    return root


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    """Photographs of two classes, a file of test classes, and one of weights."""
    photographs = tmp_path / "photographs"
    for name, size in {"a/1.jpg": (60, 40), "a/2.png": (9, 30), "b/ü.jpg": (20, 20)}.items():
        (photographs / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (200, 10, 10)).save(photographs / name)
    (photographs / "notes.txt").write_text("no image")
    test_classes, weights = tmp_path / "classes.txt", tmp_path / "trunk.safetensors"
    test_classes.write_text("b\n")
    weights.write_bytes(bytes(100))
    return {"photographs": photographs, "test-classes": test_classes, "weights": weights}


def make(folder: Path, data: dict[str, Path]) -> Path:
    words = [f"--{name}={path}" for name, path in data.items()]
    offline_bundle.main(["make", str(folder), "--side=20", *words])
    return folder


def copy_files(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tracked files alone, on the machine without a network."""
    copy = project.with_name("copy")
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".git"))
    (copy / "code" / "file.py").chmod(0o755)  # as archives may lose it
    shutil.rmtree(project)
    monkeypatch.setattr(offline_bundle, "ROOT", copy)
    return copy


def open_bundle(folder: Path, target: Path) -> None:
    offline_bundle.main(["open", str(folder), str(target)])


def test_what_is_packed_arrives(project, data, tmp_path, monkeypatch, capsys):
    commits = git(project, "rev-list", "HEAD").split()
    folder, target = make(tmp_path / "bundle", data), tmp_path / "target"
    copy = copy_files(project, monkeypatch)
    open_bundle(folder, target)

    arrived = target / "photographs" / "photographs"
    sizes = {}
    for path in filter(Path.is_file, arrived.rglob("*")):
        with Image.open(path) as image:
            sizes[str(path.relative_to(arrived))] = image.size
    assert sizes == {"a/1.jpg": (30, 20), "a/2.png": (9, 30), "b/ü.jpg": (20, 20)}
    small = (arrived / "a" / "2.png").read_bytes()  # a smaller one stays as it is
    assert small == (data["photographs"] / "a" / "2.png").read_bytes()
    assert (target / "photographs" / "photographs_test_classes.txt").read_text() == "b\n"
    assert (target / "weights" / "trunk.safetensors").read_bytes() == bytes(100)

    assert git(copy, "rev-list", "HEAD").split() == commits
    assert git(copy, "status", "--porcelain") == ""
    (copy / "code" / "file.py").write_text("another")
    shutil.rmtree(copy / ".git")
    open_bundle(folder, target)
    assert "1 files differ from it\n   M code/file.py\n" in capsys.readouterr().out


def test_a_damaged_bundle_is_refused(project, tmp_path):
    whole = make(tmp_path / "bundle", {})
    manifest = (whole / "manifest.json").read_bytes()
    another = json.dumps(json.loads(manifest) | {"python": "3.1"}).encode()
    for name, content, message in (
        ("repository/objects/pack/*.pack", b"cut", r"\.pack: is missing or damaged"),
        ("manifest.json", manifest[:50], r"manifest\.json: is missing or damaged"),
        ("manifest.json", another, r"is for Python 3\.1"),
    ):
        folder = shutil.copytree(whole, tmp_path / "damaged")
        [path] = folder.glob(name)
        path.unlink()  # git's packs are read-only
        path.write_bytes(content)
        with pytest.raises(SystemExit, match=message):
            open_bundle(folder, tmp_path / "target")
        assert not (tmp_path / "target").exists()
        shutil.rmtree(folder)


def test_nothing_else_is_overwritten_or_bundled(project, data, tmp_path):
    folder, photographs = make(tmp_path / "bundle", {}), data["photographs"]
    foreign, mixed = tmp_path / "foreign", shutil.copytree(folder, tmp_path / "mixed")
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "app"}')
    (mixed / "runs").mkdir()
    (mixed / "manifest.json").write_text('{"commit": "", "python": "", "files": {}}')
    commands = [("open", folder, target) for target in (photographs, foreign, mixed)]
    for command in (("make", photographs), *commands):
        with pytest.raises(SystemExit, match="is neither empty nor a bundle"):
            offline_bundle.main([str(word) for word in command])
    with pytest.raises(SystemExit, match="holds no images"):
        make(tmp_path / "empty", {"photographs": project})
    (project / "code" / "file.py").write_text("another")
    with pytest.raises(SystemExit, match=r"tracked files have changes, .* code/file\.py"):
        make(tmp_path / "changed", data)
    assert not {*tmp_path.glob("empty*"), *tmp_path.glob("changed*")}
    assert (photographs / "notes.txt").exists() and (mixed / "runs").exists()


def test_missing_packages_are_those_that_no_present_one_brings():
    missing = {*offline_bundle.missing_packages("3.12", offline_bundle.PRESENT)}
    assert {"pytorch-metric-learning", "docstring-parser"} <= missing  # needed, and what that needs
    assert not {"torch", "numpy", "typing-extensions", "faiss-cpu"} & missing


def test_a_second_opening_changes_nothing_and_a_newer_bundle_takes_the_place(
    project, data, tmp_path, monkeypatch
):
    first, target = make(tmp_path / "first", data), tmp_path / "target"
    (data["photographs"] / "a" / "1.jpg").unlink()
    (project / "code" / "file.py").write_text("changed")
    git(project, "commit", "-q", "-a", "-m", "changed")
    commit = git(project, "rev-parse", "HEAD")
    second = make(tmp_path / "second", data)
    make(second, data)  # a bundle may be made again
    open_bundle(first, tmp_path / "beside a clone")
    assert git(project, "rev-parse", "HEAD") == commit  # it keeps its own repository
    copy = copy_files(project, monkeypatch)
    open_bundle(first, target)
    before = {path: path.stat().st_mtime_ns for path in [*target.rglob("*"), copy / ".git"]}
    open_bundle(first, target)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    open_bundle(second, target)
    left = {path.name for path in (target / "photographs" / "photographs").rglob("*.*")}
    assert left == {"2.png", "ü.jpg"}
    assert git(copy, "rev-parse", "HEAD") == commit
    assert git(copy, "status", "--porcelain") == ""
    git(copy, "commit", "-q", "--allow-empty", "-m", "made here")
    open_bundle(first, target)
    assert git(copy, "rev-parse", "HEAD^") == commit  # is not lost
