"""The site of `make docs`: its navigation has every page, it builds strictly and needs no network."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import pml_regularizers
from tests.support.processes import ROOT


def test_every_page_and_notebook_is_in_the_navigation_once() -> None:
    found = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    pages = (ROOT / "docs" / "studies.md").read_text()  # one entry for all studies
    found += set(re.findall(r"(?:photographs_\w+|claims|fixed_projections)\.md", pages))
    assert len(found) == len(set(found))
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")}
    assert written | notebooks | {"index.md", "contributing.md", "changelog.md"} == {
        path for path in found if not path.startswith("api/")
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material, of the extra docs, is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_nothing_is_fetched_when_a_page_is_read(site: Path) -> None:
    fetched = r'<(?:script|img|iframe|source)[^>]* src="?(\w+:)?//|<link[^>]* href="?(\w+:)?//'
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(texts) > 30
    assert not (site / "404.html").exists()  # its links are absolute
    for path, text in texts.items():
        assert not re.search(fetched, text), path
    assert not re.search(r"url\(\W?(\w+:)?//|@import", (site / "assets" / "site.css").read_text())


@pytest.mark.slow
def test_every_public_name_is_described_once(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    for name in pml_regularizers.__all__:
        assert len(re.findall(rf'<h2 id="pml_regularizers\.[\w.]+\.{name}"', text)) == 1, name
    assert "&gt;&gt;&gt;" in text and "Examples:" in text
    assert "<blockquote>" not in text  # an example that was taken for a quotation


@pytest.mark.slow
def test_equations_are_mathml(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        written = page.read_text()
        blocks = re.findall(r"^```math\n.*?```|^\$\$$.*?^\$\$$", written, re.DOTALL | re.MULTILINE)
        text = (site / f"{page.stem}.html").read_text()
        drawn = re.findall(r'<div class="equations">(.*?)</div>', text, re.DOTALL)
        assert len(drawn) == len(blocks), page.name
        plain = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "$" not in plain, page.name
        # A formula that has broken its paragraph; commands that the converter does not know.
        assert not re.search(r"</p>\s*<math", plain), page.name
        for equation in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert not re.search(r"\\|>&(amp;)?<", equation), page.name


def test_a_page_gets_the_repositorys_address_and_no_image_of_github(monkeypatch) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs, of the extra docs, is not installed")
    from tools.site_hooks import on_page_markdown

    actions, badge = "../../actions/workflows/ci.yml", "![Python](docs/assets/badge_python.svg)"
    text = f"[![CI]({actions}/badge.svg)]({actions}) {badge}\n```bash\n%s\n```"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    for address in ("ADDRESS_OF_THIS_REPOSITORY", "https://example.org/me/mine"):
        shown = on_page_markdown(text % "git clone ADDRESS_OF_THIS_REPOSITORY", page)
        assert shown == f"{badge.replace('docs/', '')}\n```bash\ngit clone {address}\n```"
        monkeypatch.setenv("REPOSITORY", "https://example.org/me/mine")
