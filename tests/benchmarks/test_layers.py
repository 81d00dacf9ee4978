"""A package of benchmarks/ imports only from the layers below it, and commands start light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYERS = (
    *("console", "datasets", "settings", "backbones", "building", "records", "evaluation"),
    *("reporting", "training", "studies"),
)
"""The packages, from the lowest. Commands stand above them, also those of a package, its `__main__.py`."""
FILES = sorted(BENCHMARKS.rglob("*.py"))


def layer(package: str) -> int:
    return LAYERS.index(package) if package in LAYERS else len(LAYERS) + (package == "command")


def imports(text: str) -> Iterator[tuple[int, str]]:
    """Lines and dotted names of what a file imports of benchmarks, in functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if node.module == "benchmarks" else str(node.module)


def faults(own: str, text: str) -> list[str]:
    """Imports of a package's file that lead upwards."""
    found = []
    for line, name in imports(text):
        package = name.removeprefix("benchmarks.").partition(".")[0]
        if name.startswith("benchmarks.") and package != own and layer(package) >= layer(own):
            found.append(f"{line}: {name} is in no lower layer")
    return found


def test_nothing_is_imported_from_above():
    assert len(FILES) > 60
    packages = {path: path.relative_to(BENCHMARKS).parts[0].removesuffix(".py") for path in FILES}
    found = {
        str(path): faults("command" if path.name == "__main__.py" else package, path.read_text())
        for path, package in packages.items()
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


QUESTIONS = """
assert run.main(["--list"]) == 0
assert run.main(["--losess=x"]) == 2
for name in ("report", "tables", "export.__main__", "evaluate", "sweep", "fair", "study", "datasets.__main__"):
    with contextlib.suppress(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
"""
HEAVY = {"torch", "numpy", "matplotlib", "scipy", "optuna", "timm"}


def test_commands_start_light():
    """A simple question does not import modules that take seconds."""
    code = f"import contextlib, importlib, sys; from benchmarks import run\n{QUESTIONS}"
    code += f"assert not set(sys.modules) & {HEAVY}, set(sys.modules) & {HEAVY}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
