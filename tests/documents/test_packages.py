"""The packages hold what they say."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import pml_regularizers
from tests.documents.test_docs import EXAMPLES, examples
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


def build_both(folder: Path) -> tuple[Path, Path]:
    """The folder that the source distribution unpacks to, and the wheel built from it."""
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    sdist = build("sdist", folder / "source", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    return unpacked, build("wheel", unpacked, folder)


@pytest.mark.slow
def test_the_packages_hold_every_tracked_file_and_the_library_alone(tmp_path: Path) -> None:
    unpacked, wheel = build_both(tmp_path)
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in names if ".egg-info/" in name or name.startswith("build/")}
    assert names - made == {*tracked(), "PKG-INFO", "setup.cfg"}
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        assert [name for name in file.namelist() if name.endswith("/LICENSE")]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "pml_regularizers").rglob("*.py")}
    assert names == modules | {"pml_regularizers/py.typed"}


def test_versions_and_requirements_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    for version in cited["version"], recipe["context"]["version"]:
        assert version == pml_regularizers.__version__
    heading = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert heading in ("Unreleased", f"{cited['version']} ({cited['date-released']})")
    about = (recipe["about"]["summary"], recipe["about"]["license"])
    assert about == (project["description"], project["license"])
    needs = {
        need.replace(" ", "").replace("pytorch>=", "torch>=")
        for need in recipe["requirements"]["run"]
    }
    for name, need in zip(
        ("python", "torch", "pml"),
        (project["requires-python"], *project["dependencies"]),
        strict=True,
    ):
        badge = (ROOT / "docs" / "assets" / f"badge_{name}.svg").read_text()
        assert f": {need.partition('>=')[2]} or newer</title>" in badge
    assert needs == {f"python{project['requires-python']}", *project["dependencies"]}


def test_the_text_of_the_package_stands_alone() -> None:
    text = (ROOT / "PACKAGE.md").read_text()
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))
    assert examples(text) == EXAMPLES[ROOT / "README.md"]
