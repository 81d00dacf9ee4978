"""The code of a training that changed since a commit; comments, docstrings and error messages do not count."""

import ast
import importlib
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from benchmarks.records.provenance import git

REPOSITORY = Path(__file__).parents[2]
LIBRARY = REPOSITORY / "pml_regularizers"
RUNNER = (
    *("backbones/network.py", "backbones/weights.py", "building/*.py", "evaluation/*.py"),
    *("datasets/glyphs.py", "datasets/images.py", "datasets/splits.py", "datasets/transforms.py"),
    "training/*.py",
)
"""Files of benchmarks/ that decide the numbers of a training on Glyphs."""


def changed_since(commit: str, class_paths: Iterable[str]) -> list[str] | None:
    """The files of a training with these classes that changed; None if the commit is unknown here."""
    names = {path.rpartition(".") for path in class_paths if path.startswith(LIBRARY.name)}
    classes = [getattr(importlib.import_module(module), name) for module, _, name in names]
    files = {path for pattern in RUNNER for path in (REPOSITORY / "benchmarks").glob(pattern)}
    for module in {one.__module__ for one in classes}:
        files |= _with_imports(LIBRARY / f"{module.rpartition('.')[2]}.py")
    try:
        return [
            str(file.relative_to(REPOSITORY))
            for file in sorted(files)
            if _code(file.read_text()) != _code_at(commit, file)
        ]
    except (OSError, subprocess.SubprocessError):
        return None


def _with_imports(file: Path) -> set[Path]:
    """The file and all files of the library that it imports, directly or not."""
    found, left = set(), {file}
    while left:
        found.add(one := left.pop())
        imports = (n for n in ast.walk(ast.parse(one.read_text())) if isinstance(n, ast.ImportFrom))
        left |= {LIBRARY / f"{n.module}.py" for n in imports if n.level and n.module} - found
    return found


@cache
def _code_at(commit: str, file: Path) -> str | None:
    """The file's code at the commit; None if it was not there."""
    git(REPOSITORY, "cat-file", "-e", f"{commit}^{{commit}}")
    try:
        return _code(git(REPOSITORY, "show", f"{commit}:{file.relative_to(REPOSITORY)}"))
    except subprocess.CalledProcessError:
        return None


@cache
def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            node.exc = node.cause = None
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_string(one)]
    return ast.dump(tree)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
