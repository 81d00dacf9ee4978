"""The site of `make docs`: every page is in its navigation, it builds strictly and needs no network."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import pml_regularizers
from tests.support.processes import ROOT

NEEDS_MKDOCS = pytest.mark.skipif(
    find_spec("material") is None, reason="mkdocs-material, of the extra docs, is not installed"
)


def pages(navigation: Any) -> list[str]:
    """The paths in a navigation of lists and dicts."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [path for part in parts for path in pages(part)]


def test_every_page_and_notebook_is_in_the_navigation_once() -> None:
    found = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(found) == len(set(found))
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")}
    assert len(written) > 20 and len(notebooks) >= 6
    assert written | notebooks | {"index.md", "contributing.md", "changelog.md"} == {
        path for path in found if not path.startswith("api/")
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@NEEDS_MKDOCS
@pytest.mark.slow
def test_nothing_is_fetched_when_a_page_is_read(site: Path) -> None:
    fetched = r'<(?:script|img|iframe|source)[^>]* src="?(\w+:)?//|<link[^>]* href="?(\w+:)?//'
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(texts) > 30
    assert not (site / "404.html").exists()  # its links are absolute
    for path, text in texts.items():
        assert not re.search(fetched, text), path
    assert not re.search(r"url\(\W?(\w+:)?//|@import", (site / "assets" / "site.css").read_text())


@NEEDS_MKDOCS
@pytest.mark.slow
def test_every_public_name_is_described_once(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    for name in pml_regularizers.__all__:
        assert len(re.findall(rf'<h2 id="pml_regularizers\.[\w.]+\.{name}"', text)) == 1, name
    assert "&gt;&gt;&gt;" in text and "Examples:" in text
    assert "<blockquote>" not in text  # an example that was taken for a quotation


@NEEDS_MKDOCS
@pytest.mark.slow
def test_equations_are_mathml(site: Path) -> None:
    count = 0
    for page in (ROOT / "docs").glob("*.md"):
        written = page.read_text()
        blocks = re.findall(r"^```math\n.*?```|^\$\$$.*?^\$\$$", written, re.DOTALL | re.MULTILINE)
        text = (site / f"{page.stem}.html").read_text()
        drawn = re.findall(r'<div class="equations">(.*?)</div>', text, re.DOTALL)
        assert len(drawn) == len(blocks), page.name
        plain = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "$" not in plain, page.name
        assert not re.search(r"</p>\s*<math", plain), (
            page.name
        )  # a formula that has broken its paragraph
        for equation in re.findall(
            r"<math.*?</math>", text, re.DOTALL
        ):  # what the converter does not know, it prints
            assert not re.search(r"\\|>&(amp;)?<", equation), page.name
        count += len(drawn)
    assert count >= 10
