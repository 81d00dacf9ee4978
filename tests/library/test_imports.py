"""What the library imports: each layer from those below it; and what the oracles do not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pml_regularizers

LIBRARY = Path(pml_regularizers.__file__).parent
LAYERS = ("offered", "functional", "unoptimized", "distributed", "features", "heads")
LAYERS += ("regularizers", "losses")
"""Folders and modules, from the lowest."""
ALONE = ("metrics", "chunked_batch", "gradient_cache", "optimizer_groups", "gradient_ratios")
"""What no layer imports."""
ORACLES = sorted((Path(__file__).parents[1] / "oracles").glob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The layer or module of each import from the library, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            above = path.parents[node.level - 1]
            yield above.joinpath(*(node.module or "").split(".")).relative_to(LIBRARY).parts[0]


def test_imports_run_one_way() -> None:
    files = [path for path in LIBRARY.rglob("*.py") if path.name != "__init__.py"]
    assert len(files) > 25
    for path in files:
        own = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        allowed = LAYERS + ALONE if own in ALONE else LAYERS[: LAYERS.index(own) + 1]
        assert set(imported(path)) <= set(allowed), path


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_oracles_import_numpy_and_math_only(path: Path) -> None:
    """One that imported the library would only agree with itself."""
    assert len(ORACLES) > 1
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Name):
            assert node.id not in {"__import__", "importlib", "exec", "eval"}
    oracles = {f"tests.oracles.{oracle.stem}" for oracle in ORACLES}
    assert imported <= {"numpy", "math", "collections.abc"} | oracles
