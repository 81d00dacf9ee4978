"""The library and its tests need torch and pytorch-metric-learning, and what these bring."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted([*(TESTS / "library").glob("*.py"), *(TESTS / "support").glob("*.py")])
THERE = {"torch", "pytorch_metric_learning", "numpy", "scipy", "sklearn", "pytest", "hypothesis"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_of_the_tests(path: Path) -> None:
    """A test requests any other package with `pytest.importorskip`."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        first = {name.split(".")[0] for name in names}
        assert first <= THERE | {"pml_regularizers", "tests"} | sys.stdlib_module_names


def test_losses_import_no_faiss() -> None:
    script = "import sys, pml_regularizers; sys.exit(bool({'faiss', 'sklearn'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
