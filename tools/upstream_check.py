"""Show that every pull request of `upstream/` fits PML: its fast suite, its format, its lint.

    python tools/upstream_check.py ../pytorch-metric-learning [--python OLD/bin/python]

The first argument is a clone, for tests and documents; the package is the source distribution on PyPI, of the
version that is installed here. In a tree of the two:

1. each system goes onto a branch of its own, and its tests pass there;
2. each goes onto the one before it: what passed before passes after, and black, isort and flake8, with PML's
   settings, find nothing in the changed files.

`--python` is an interpreter with an older torch, which runs the systems' own tests.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import upstream

PACKAGE = "pytorch-metric-learning"
# Tests that download data sets, and those that take longer than all others together.
SLOW = (
    "--ignore=tests/datasets",
    "--ignore=tests/utils/test_calculate_accuracies_large_k.py",
    "--deselect=tests/losses/test_cross_batch_memory.py::TestCrossBatchMemory::test_sanity_check",
    "--deselect=tests/losses/test_cross_batch_memory.py::TestCrossBatchMemory::test_all_losses",
    "--deselect=tests/samplers/test_m_per_class_sampler.py",
    "--deselect=tests/samplers/test_fixed_set_of_triplets.py",
    "--deselect=tests/distances/test_batched_distance.py",
    "--deselect=tests/utils/test_calculate_accuracies.py::TestCalculateAccuraciesValidK::test_k_warning",
    "--deselect=tests/utils/test_loss_and_miner_utils.py::TestLossAndMinerUtils::test_get_all_triplets_indices",
)
ENVIRONMENT = {"TEST_DTYPES": "float32,float64", "TEST_DEVICE": "cpu", "PYTHONPATH": "src"}


def run(
    command: Sequence[str | Path], folder: Path, *, may_fail: bool = False, **settings: str
) -> str:
    """The output of a command, which has to succeed unless it may fail."""
    words = list(map(str, command))
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=folder, env={**os.environ, **settings}, check=False, **told)
    if done.returncode and not may_fail:
        raise SystemExit(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}")
    return str(done.stdout)


def build(clone: Path, folder: Path) -> Path:
    """A repository of the released package with the clone's tests and documents."""
    version = importlib.metadata.version(PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps"]
    run([*pip, "--no-build-isolation", f"{PACKAGE}=={version}"], folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (unpacked,) = folder.glob("*/src")
    tree = folder / "tree"
    tree.mkdir()
    kept = ["tests", "docs/*.md", "CONTENTS.md", ".flake8"]
    archived = folder / "kept.tar"
    run(["git", "-C", clone, "archive", f"--output={archived}", "HEAD", *kept], folder)
    with tarfile.open(archived) as file:
        file.extractall(tree, filter="data")
    unpacked.rename(tree / "src")
    (tree / ".gitignore").write_text("__pycache__/\n*.egg-info/\n")
    run(["git", "init", "--initial-branch=dev"], tree)
    run(["git", "config", "user.name", "Check"], tree)
    run(["git", "config", "user.email", "check@example.com"], tree)
    run(["git", "add", "."], tree)
    run(["git", "commit", f"--message={PACKAGE} {version}"], tree)
    return tree


def suite(tree: Path) -> dict[str, bool]:
    """Test of PML's -> whether it passes; slow and skipped ones are left out."""
    report = tree.parent / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull]
    pytest = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *SLOW, "tests"]
    run(pytest, tree, may_fail=True, **ENVIRONMENT)
    return {
        f"{case.get('classname')}.{case.get('name')}": not list(case)
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("skipped") is None
    }


def own_tests(tree: Path, system: str, python: str, dtypes: str) -> int:
    """Run the tests that the system brings; return their number once all pass."""
    files = (upstream.SOURCES / system / "tests").rglob("test_*.py")
    paths = [path.relative_to(upstream.SOURCES / system) for path in files]
    names = [".".join(path.with_suffix("").parts) for path in paths]
    settings = {**ENVIRONMENT, "TEST_DTYPES": dtypes}
    output = run([python, "-m", "unittest", *names], tree, **settings)
    return int(output.split("Ran ")[1].split()[0])


def lint(tree: Path, tools: Path, before: str) -> None:
    """PML's three commands, on what was changed since `before`."""
    listed = run(["git", "diff", "--name-only", before, "--", "*.py"], tree).split()
    for command in (("black", "--check"), ("isort", "--profile=black", "--check"), ("flake8",)):
        run([sys.executable, "-m", *command, *listed], tree, PYTHONPATH=str(tools))


def main() -> None:
    about = "Show that every pull request of upstream/ fits PML."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("clone", type=Path, metavar="CLONE", help="a clone of PML")
    parser.add_argument("--python", metavar="PATH", help="an interpreter with an older torch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = build(arguments.clone.resolve(), folder)
        tools = folder / "tools"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", tools]
        run([*pip, "black", "isort", "flake8"], folder)

        for system in upstream.SYSTEMS:
            run(["git", "switch", "dev"], tree)
            upstream.place(tree, system, branch=True)
            tests = own_tests(tree, system, sys.executable, "float16,float32,float64")
            print(f"{system}, alone: {tests} tests pass", flush=True)
            if arguments.python:
                own_tests(tree, system, arguments.python, "float32,float64")
                print(f"{system}, alone: they pass with {arguments.python}", flush=True)

        run(["git", "switch", "--detach", "dev"], tree)
        before = suite(tree)
        print(f"PML: {sum(before.values())} tests pass, {len(before)} ran", flush=True)
        for system in upstream.SYSTEMS:
            run(["git", "branch", "--delete", "--force", system.replace("_", "-")], tree)
            onto = run(["git", "rev-parse", "HEAD"], tree).strip()
            upstream.place(tree, system, branch=True)
            lint(tree, tools, onto)
            after = suite(tree)
            lost = [test for test, passed in before.items() if passed and not after.get(test)]
            failed = [test for test in after.keys() - before.keys() if not after[test]]
            if lost or failed or len(after) <= len(before):
                raise SystemExit(f"{system}: {len(after)} tests ran; failed: {lost + failed}")
            counts = run(["git", "diff", "--numstat", onto, "HEAD"], tree).splitlines()
            lines = sum(int(n) for line in counts for n in line.split()[:2] if n != "-")
            told = f"{sum(after.values())} tests pass, {len(after)} ran; nothing for the linters"
            print(f"{system}, onto those before: {lines} lines; {told}", flush=True)
            before = after


if __name__ == "__main__":
    main()
