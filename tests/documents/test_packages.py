"""The packages hold what they say."""

import email
import email.message
import re
import zipfile
from pathlib import Path

import pytest
import yaml

import pml_regularizers
from tests.documents.test_docs import EXAMPLES, examples
from tests.support.packages import build_both, tracked
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return build_both(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def metadata(packages: tuple[Path, Path, Path]) -> email.message.Message:
    with zipfile.ZipFile(packages[2]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(wheel.read(name))


def test_the_source_distribution_holds_every_tracked_file(
    packages: tuple[Path, Path, Path],
) -> None:
    _, unpacked, _ = packages
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in names if ".egg-info/" in name or name.startswith("build/")}
    assert names - made == {*tracked(), "PKG-INFO", "setup.cfg"}


def test_the_wheel_holds_the_library_alone(packages: tuple[Path, Path, Path]) -> None:
    with zipfile.ZipFile(packages[2]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "pml_regularizers").rglob("*.py")}
    assert names == modules | {"pml_regularizers/py.typed"}


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Version"] == pml_regularizers.__version__
    required = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(required) == ["pytorch-metric-learning>=2.9", "torch>=2.4"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()  # stands alone, without the files beside it
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))
    assert examples(text) == EXAMPLES[ROOT / "README.md"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == pml_regularizers.__version__
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == pml_regularizers.__version__
    needs = {
        need.replace(" ", "").replace("pytorch>=", "torch>=")
        for need in recipe["requirements"]["run"]
    }
    assert needs == {f"python{metadata['Requires-Python']}", *required}
