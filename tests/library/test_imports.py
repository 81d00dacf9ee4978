"""What the library imports: each layer from those below it, and only what is needed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pml_regularizers

LIBRARY = Path(pml_regularizers.__file__).parent
LAYERS = ("functional", "distributed", "features", "heads", "regularizers", "losses")
"""Folders and modules, from the lowest."""
ALONE = ("metrics", "gradient_cache", "optimizer_groups", "gradient_ratios", "_unwrapping")
"""What no layer imports."""


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
