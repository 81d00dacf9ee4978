"""What a contributor is told: the worked example passes, and what CI runs is there."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.documents.test_measured_numbers import exists
from tests.support.processes import ROOT

LIGHT = {"pml_regularizers", "pytorch_metric_learning", "tests"}
LIGHT |= {"hypothesis", "numpy", "pytest", "sklearn", "torch", "torchgen", "yaml"}
"""What `pip install -e '.[dev]'` brings; yaml comes with timm."""


def test_the_librarys_tests_need_no_more_than_the_light_install() -> None:
    files = [*ROOT.glob("tests/library/*.py"), *ROOT.glob("tests/oracles/*.py")]
    files += [ROOT / "tests" / "conftest.py", *ROOT.glob("tests/support/*.py")]
    assert len(files) > 50
    for path in files:
        for node in ast.parse(path.read_text()).body:  # not what a function imports for a case
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found = {name.partition(".")[0] for name in names}
            assert found <= LIGHT | sys.stdlib_module_names, path


@pytest.mark.slow
def test_the_worked_example_passes_what_a_contribution_must_pass(tmp_path: Path) -> None:
    for name in ("pml_regularizers", "tests", "docs", "examples"):
        unneeded = shutil.ignore_patterns("__pycache__", "*.svg", "*.png")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unneeded)
    for name in ("pyproject.toml", "mkdocs.yml"):
        shutil.copy2(ROOT / name, tmp_path)
    text = (ROOT / "docs" / "adding_a_method.md").read_text()
    diffs = re.findall(r"^```udiff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    changed = re.findall(r"^\+\+\+ b/(.*)", "".join(diffs), re.MULTILINE)
    assert len(changed) == 7

    def run(*command: str) -> str:
        words = {"input": "".join(diffs), "capture_output": True, "text": True, "check": False}
        settings = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=settings, **words)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr
        return done.stdout

    run("git", "apply", "-C1")
    python = [name for name in changed if name.endswith(".py")]
    run(sys.executable, "-m", "ruff", "check", *python)
    run(sys.executable, "-m", "ruff", "format", "--check", *python)
    chosen = "sigmoid or every_public_class or oracles_import or navigation"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-k", chosen]
    tests = ["tests/library", "tests/documents/test_site.py", "pml_regularizers/losses"]
    printed = run(sys.executable, "-m", "pytest", *options, *tests)
    assert int(re.findall(r"(\d+) passed", printed)[-1]) > 30


def test_the_commands_of_ci_exist() -> None:
    commands = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            commands += [step["run"] for step in job["steps"] if "run" in step]
    made = [command for command in commands if command.startswith("make ")]
    assert len(made) >= 5
    for command in made:
        assert exists(" ".join(command.split()[:2])), command
    readme = (ROOT / "README.md").read_text()
    for target in re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE):
        assert target in readme or target == "make lint"
