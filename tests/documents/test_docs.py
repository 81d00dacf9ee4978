"""The Python examples of the documents run, in their order, as one script per document; and the notebooks."""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(text: str) -> list[str]:
    """The Python blocks of a page, and what its diffs add to or leave of a program."""
    blocks = re.findall(r"^```(python|diff)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [
        re.sub(r"^(-.*\n|[+ ] |$)", "", code, flags=re.MULTILINE) if kind == "diff" else code
        for kind, code in blocks
    ]


EXAMPLES = {page: blocks for page in PAGES if (blocks := examples(page.read_text()))}
assert len(EXAMPLES) > 6
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
assert NOTEBOOKS


SLOW = ("integrations.md", "backbones.md", "heads.md", "recipes.md", "text_encoders.md")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # in PML's trainers
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # in transformers' Trainer
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # in Lightning, of torch
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW else page
        for page in EXAMPLES
    ],
    ids=lambda page: page.name,
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(EXAMPLES[page]))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
def test_the_script_for_several_processes_ends_equal_on_both(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = "import sys\nsys.stdout.reconfigure(write_through=False)\n"  # launchers start with -u
    script.write_text(lines + EXAMPLES[ROOT / "docs" / "integrations.md"][0])
    output = run([], processes=2, script=script)
    printed = re.findall(r"\d+\.\d+ -?\d+\.\d+", output)  # a warning may stand on the same line
    assert len(printed) == 2 and len(set(printed)) == 1, output


def test_links_lead_somewhere() -> None:
    pages = {*PAGES, *ROOT.glob("*.md")}
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target and not target.startswith("../../actions/")  # GitHub's
    ]
    assert len(links) >= 4
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_figure_of_the_results_is_up_to_date() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from results_figure import figure

    drawn = (ROOT / "docs" / "results.svg").read_bytes()
    texts = re.findall(rb">([^<]+)</text>", drawn)  # another Matplotlib may draw them elsewhere
    assert len(texts) > 50 and texts == re.findall(rb">([^<]+)</text>", figure())


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_outputs_are_kept_and_small(path: Path) -> None:
    text = path.read_text()
    cells = code_cells(json.loads(text))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and len(text) < 64 * 1024
    assert all(o["output_type"] != "error" and o.get("name") != "stderr" for o in outputs)
    for place in (str(ROOT), str(Path.home()), "site-packages"):
        assert place not in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PHOTOS", raising=False)
    notebook = nbformat.read(path, 4)
    kept = [bool(cell.outputs) for cell in code_cells(notebook)]
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1200, resources=resources).execute()
    # A cell that printed prints.
    assert kept == [bool(cell.outputs) for cell in code_cells(notebook)]
