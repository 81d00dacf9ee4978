"""The wheel in fresh environments: README's example without a warning, and the library's tests.

Every Python from 3.11 on that is found takes the newest packages; the oldest one also takes the lower bounds.
"""

import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.documents.test_docs import EXAMPLES
from tests.documents.test_packages import build_both
from tests.support.processes import ROOT

pytestmark = pytest.mark.release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOWEST = [re.sub(r">=(.*)", r"==\1.*", need) for need in PROJECT["dependencies"]]
OLDEST = PROJECT["requires-python"].removeprefix(">=")
CASES = {
    f"{OLDEST}, lower bounds": (OLDEST, LOWEST),
    **{version: (version, []) for version in (OLDEST, "3.12", "3.13", "3.14")},
}
TESTS_NEED = ["pytest", "hypothesis", "faiss-cpu", "record-keeper", "tensorboard"]
TIMEOUT = 3600  # a fresh torch is some gigabytes


def interpreter(version: str) -> str:
    """The path of a Python that can make environments; skips the test without one."""
    for folder in os.get_exec_path():
        path = shutil.which(f"python{version}", path=folder)
        # pyenv's stand-ins fail, where their version is not the chosen one.
        if path and not subprocess.run([path, "-c", "import ensurepip"], check=False).returncode:
            return path
    pytest.skip(f"no python{version} on the PATH")


def run(*command: object, folder: Path) -> str:
    clean = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTEST_ADDOPTS": ""}
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": TIMEOUT}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=clean, text=True, check=False, **told)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The unpacked source distribution without the code, and the wheel."""
    unpacked, wheel = build_both(tmp_path_factory.mktemp("packages"))
    for code in ("pml_regularizers", "benchmarks"):
        shutil.rmtree(unpacked / code)
    return unpacked, wheel


@pytest.mark.parametrize(("version", "bounds"), CASES.values(), ids=CASES)
def test_the_wheel_runs_readmes_example_and_passes_the_librarys_tests(
    version: str, bounds: list[str], packages: tuple[Path, Path], tmp_path: Path
) -> None:
    unpacked, wheel = packages
    with tempfile.TemporaryDirectory() as name:  # gigabytes, removed at once
        python = Path(name) / "bin" / "python"
        run(interpreter(version), "-m", "venv", name, folder=tmp_path)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        quick = ["--quiet", "--no-compile"]  # most of a fresh torch is never imported
        run(*pip, "install", *quick, wheel, *bounds, "timm", *TESTS_NEED, folder=tmp_path)

        (example,) = EXAMPLES[ROOT / "README.md"]
        where = "\nimport pml_regularizers\nprint(pml_regularizers.__file__)\n"
        (tmp_path / "example.py").write_text(example + where)
        *losses, file = run(python, "-W", "error", "example.py", folder=tmp_path).splitlines()
        assert "loss" in losses[-1] and Path(file).is_relative_to(name)

        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
        if bounds:
            # torch 2.4 breaks graphs that newer ones keep whole, and newer NumPy the interpreter of its Triton; on
            # Apple's GPUs it lacks the gradient of cdist.
            options += ["-k", "not compile and not interpreter"]
            on_apple = "tests/library/test_devices.py::test_losses_on_a_device_without_float64"
            options += [
                f"--deselect={on_apple}[{name}]" for name in ("pooled features", "JRS, Laplace")
            ]
        printed = run(python, "-m", "pytest", *options, "tests/library", folder=unpacked)
        assert int(re.findall(r"(\d+) passed", printed)[-1]) > 300
