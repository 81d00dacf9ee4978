"""Folders of the library import only from those below, so that one can read them from the bottom up."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pml_regularizers

LIBRARY = Path(pml_regularizers.__file__).parent
LAYERS = ("functional", "distributed", "features", "heads", "regularizers", "losses")
"""Folders and modules, from the lowest."""
ALONE = ("metrics", "gradient_cache", "optimizer_groups", "gradient_ratios", "_unwrapping")
"""What no layer imports."""
FILES = sorted(path for path in LIBRARY.rglob("*.py") if path.name != "__init__.py")


def imported(path: Path) -> Iterator[str]:
    """The layer or module of each import from the library, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            above = path.parents[node.level - 1]
            target = above.joinpath(*(node.module or "").split("."))
            yield target.relative_to(LIBRARY).parts[0]


def layer(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def test_every_file_has_a_layer() -> None:
    assert len(FILES) > 25
    assert {layer(path) for path in FILES} <= {*LAYERS, *ALONE}


def test_imports_run_one_way() -> None:
    upwards = [
        f"{path.name} imports {name}"
        for path in FILES
        if (own := layer(path)) in LAYERS
        for name in imported(path)
        if name not in LAYERS[: LAYERS.index(own) + 1]
    ]
    assert upwards == []


def test_only_the_root_imports_what_stands_alone() -> None:
    others = [
        f"{path.name} imports {name}"
        for path in FILES
        for name in imported(path)
        if name in ALONE and layer(path) not in ALONE
    ]
    assert others == []
