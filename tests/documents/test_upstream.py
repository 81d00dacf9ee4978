"""Pull requests for PML: each is small, stands by itself, goes onto those before it, and passes its tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_metric_learning

from tests.support.processes import ROOT, TIMEOUT

sys.path.insert(0, str(ROOT / "tools"))

import upstream

PACKAGE = "src/pytorch_metric_learning"


def patched(name: str) -> str:
    """The lines that the patch of a document expects, below others."""
    (patch,) = upstream.SOURCES.glob(f"*/{name}.patch")
    return "\n" * 12 + "".join(re.findall(r"^[ -](?!--)(.*\n)", patch.read_text(), re.MULTILINE))


DOCUMENTS = {
    "CONTENTS.md": "### [Losses](x)\n"
    "| [**AngularLoss**](x/losses/#angularloss) |\n| [**VICRegLoss**](x/losses/#vicregloss) |\n"
    "### Utils\n| [**AccuracyCalculator**](x/accuracy_calculation) |\n| [**HookContainer**](x/hooks) |\n",
    "docs/losses.md": "# Losses\n\n## AngularLoss \nOld.\n"
    + patched("docs/losses.md")
    + "\n## VICRegLoss\nOld.\n",
    **{name: patched(name) for name in ("docs/distributed.md", "docs/extend/losses.md")},
    "docs/accuracy_calculation.md": "# Accuracy\n\n### Parameters\n\n### Using it\n",
    "tests/__init__.py": "import torch\n\nTEST_DEVICE = torch.device('cpu')\n"
    "TEST_DTYPES = [torch.float16, torch.float32, torch.float64]\n",
    "tests/losses/__init__.py": "",
    "tests/utils/__init__.py": "",
}


def git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository like PML's, from the installed package; branches beside its first leave it as it is."""
    folder = tmp_path_factory.mktemp("pml")
    installed = Path(pytorch_metric_learning.__file__).parent
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, folder / PACKAGE, ignore=unneeded)
    for name, text in DOCUMENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text("__pycache__\n")
    git(folder, "init", "--initial-branch=dev")
    git(folder, "config", "user.name", "N")
    git(folder, "config", "user.email", "e@x")
    git(folder, "add", ".")
    git(folder, "commit", "--message=PML")
    return folder


@pytest.fixture(scope="module")
def stacked(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a branch of each system that starts from the one before."""
    tree = shutil.copytree(clone, tmp_path_factory.mktemp("stacked") / "pml")
    assert upstream.main([str(tree), "--branch"]) == 0
    return tree


def test_each_is_small_and_changes_the_same_lines_after_others(clone, stacked, tmp_path):
    apart = shutil.copytree(clone, tmp_path / "pml")
    parent, table = "dev", (ROOT / "docs" / "upstream.md").read_text()
    for system in upstream.SYSTEMS:
        git(apart, "switch", "dev")
        assert upstream.main([str(apart), "--only", system, "--branch"]) == 0
        here = system.replace("_", "-")
        counts = git(apart, "diff", "--numstat", "dev", here)
        assert counts == git(stacked, "diff", "--numstat", parent, here)
        parent = here
        cells = [line.split()[:2] for line in counts.splitlines()]
        changed = sum(int(n) for cell in cells for n in cell if n != "-")
        assert 50 < changed <= 900
        assert re.search(rf"\| `{system}` \|.*\| {changed} \|", table), (system, changed)
        assert "pml_regularizers" not in git(apart, "diff", "dev", here)
        added = re.findall(
            r"^\+(?!\+\+)(.*)", git(apart, "diff", "dev", here, "--", PACKAGE), re.MULTILINE
        )
        assert not any(Path(PACKAGE).name in line for line in added)  # imports are relative
    files = {
        str(path.relative_to(upstream.OFFERED)) for path in upstream.OFFERED.glob("*/[!_]*.py")
    }
    assert sorted(name for names in upstream.SYSTEMS.values() for name in names) == sorted(files)


def test_refuses_to_overwrite_and_to_commit_beside_changes(clone, tmp_path, capsys):
    tree = shutil.copytree(clone, tmp_path / "outer" / "pml")
    for name in "losses/horde_loss.py", "utils/distributed.py":
        (tree / PACKAGE / name).write_text("another\n")
    with (tree / "docs" / "losses.md").open("a") as page:
        page.write("\n\n## EnergyConfusionLoss\nanother\n")
    before = git(tree, "status", "--porcelain")
    for system, more, message in (
        ("energy_confusion", (), "EnergyConfusionLoss"),
        ("horde", (), "horde_loss.py: "),
        ("distributed", (), "distributed.py.patch"),
        ("variance", ("--branch",), "clean work tree"),
    ):
        assert upstream.main([str(tree), "--only", system, *more]) == 2
        assert message in capsys.readouterr().err
        assert git(tree, "status", "--porcelain") == before
    shutil.move(tree / ".git", tree.parent)
    assert upstream.main([str(tree), "--only", "variance", "--branch"]) == 2
    assert "folder pml/" in capsys.readouterr().err


@pytest.mark.slow
def test_placed_unit_tests_pass(stacked):
    """Those of the wrapper start processes; here `tests/documents/test_upstream_numbers.py` compares it."""
    new = [path for path in stacked.glob("tests/*/test_*.py") if "distributed" not in path.name]
    assert len(new) == 7
    names = [".".join(path.relative_to(stacked).with_suffix("").parts) for path in new]
    settings = {**os.environ, "PYTHONPATH": str(stacked / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unittest", *names]
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT, "check": False}
    done = subprocess.run(command, cwd=stacked, env=settings, **options)
    assert done.returncode == 0, done.stderr
    tests = sum(path.read_text().count("def test_") for path in new)
    assert tests > 30 and f"Ran {tests} tests" in done.stderr
