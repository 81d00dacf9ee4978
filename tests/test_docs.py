"""The Python examples of the documents run, in their order, as one script per document."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, TIMEOUT, environment

DOCUMENTS = ["README.md", "docs/horde.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_run(document: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_document_with_examples_is_tested() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    with_examples = {
        str(page.relative_to(ROOT)) for page in pages if "```python" in page.read_text()
    }
    assert with_examples == set(DOCUMENTS)


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target
    ]
    assert len(links) >= 4
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name}: {target}"
