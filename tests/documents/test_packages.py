"""The packages hold what they say, and README, CITATION.cff and the badges agree with them."""

import email
import email.message
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import pml_regularizers
from tests.documents.test_docs import EXAMPLES
from tests.support.packages import build_both, tracked
from tests.support.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    modules = {path.name for path in (ROOT / "pml_regularizers").glob("*.py")}
    assert names == {f"pml_regularizers/{name}" for name in modules | {"py.typed"}}


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Version"] == pml_regularizers.__version__
    required = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(required) == ["pytorch-metric-learning>=2.9", "torch>=2.4"]
    assert len(metadata.get_all("Project-URL", [])) >= 3


def test_the_long_description_stands_alone(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "The wheel holds the library alone" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert re.findall(r"```python\n(.*?)```", text, re.DOTALL) == EXAMPLES[ROOT / "README.md"]


def test_badges_say_what_the_project_says() -> None:
    bounds = dict(re.fullmatch(r"(\S+?)>=(\S+)", need).groups() for need in PROJECT["dependencies"])  # type: ignore[union-attr]
    expected = {
        "licence": PROJECT["license"],
        "python": f"{PROJECT['requires-python'].removeprefix('>=')} or newer",
        "torch": f"{bounds['torch']} or newer",
        "pml": f"{bounds['pytorch-metric-learning']} or newer",
    }
    readme = (ROOT / "README.md").read_text()
    for name, text in expected.items():
        path = f"docs/assets/badge_{name}.svg"
        (title,) = re.findall(r"<title>(.*)</title>", (ROOT / path).read_text())
        assert title.endswith(f": {text}") and f"![{title}]({path})" in readme
        assert f">{text}</text>" in (ROOT / path).read_text()


def test_citation() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # those it must have
    assert cited["version"] == pml_regularizers.__version__ and cited["title"] == PROJECT["name"]
    assert cited["license"] == PROJECT["license"]
    (bibtex,) = re.findall(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    entries = [re.sub(r"[{}]", "", entry) for entry in bibtex.split("\n@")]
    assert len(entries) == len(cited["references"]) == 4
    for entry, paper in zip(entries, cited["references"], strict=True):
        assert f"title = {paper['title']}," in entry
        names = " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"])
        assert f"author = {names}," in entry
        assert ("year" in paper) == ("year" in entry) and str(paper.get("year", "")) in entry
