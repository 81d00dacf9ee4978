"""An oracle that imported the library would only agree with itself."""

import ast
from pathlib import Path

import pytest

ORACLES = sorted((Path(__file__).parents[1] / "oracles").glob("*.py"))
ALLOWED = {"numpy", "math", "collections.abc"}


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_oracles_import_numpy_and_math_only(path: Path) -> None:
    assert len(ORACLES) > 1
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Name):
            assert node.id not in {"__import__", "importlib", "exec", "eval"}
    assert imported <= ALLOWED
