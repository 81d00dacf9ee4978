"""The source distribution and the wheel, built from the tracked files."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT


def tracked() -> list[str]:
    """The files that git tracks or would; skips the test where there is no git repository."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git repository: packages are built from tracked files")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def build(kind: str, source: Path, output: Path) -> Path:
    """The "sdist" or "wheel" of a tree, by the setuptools of this environment."""
    script = f"import sys\nfrom setuptools import build_meta\nprint(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


def build_both(folder: Path) -> tuple[Path, Path, Path]:
    """The source distribution, the folder that it unpacks to, and the wheel built from that folder."""
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    sdist = build("sdist", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    return sdist, unpacked, build("wheel", unpacked, folder)
