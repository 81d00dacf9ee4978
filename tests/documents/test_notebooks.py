"""The notebooks in examples/ run, and keep what they print."""

import os
from pathlib import Path

import pytest

from tests.support.processes import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_small(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert all(o.output_type != "error" and o.get("name") != "stderr" for o in outputs)
    assert path.stat().st_size < 64 * 1024
    for place in (str(ROOT), str(Path.home()), "site-packages"):
        assert place not in path.read_text()


def test_letters_are_drawn_alike_and_trained_on() -> None:
    drawings = set()
    for path in NOTEBOOKS:
        if "PHOTOS" in path.read_text():
            cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
            printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
            assert printed.startswith("drawn letters: "), path.name
            (drawn,) = [cell.source for cell in cells if "def draw(" in cell.source]
            drawings.add(drawn.split("\n\nfolder =")[0])
    assert len(drawings) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PHOTOS", raising=False)
    notebook = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1200, resources=resources).execute()
    # As before the run: a cell that printed prints.
    for before, after in zip(nbformat.read(path, 4).cells, notebook.cells, strict=True):
        if before.cell_type == "code":
            assert bool(before.outputs) == bool(after.outputs), before.source
