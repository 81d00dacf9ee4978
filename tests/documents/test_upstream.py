"""The library placed in PML's source tree: it imports, lints and passes there, and nothing of PML changes."""

import ast
import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_metric_learning

from tests.support.processes import ROOT, TIMEOUT

sys.path.insert(0, str(ROOT / "tools"))

import upstream
import upstream_docs
import upstream_lower

NEW = Path("src/pytorch_metric_learning/losses/horde_loss.py")
INIT = Path("src/pytorch_metric_learning/losses/__init__.py")
ADDED_TO = {
    INIT,
    *map(Path, ("CONTENTS.md", "docs/losses.md", "docs/distributed.md", "mkdocs.yml")),
}
DOCUMENTS = {
    "CONTENTS.md": "### [Losses](x)\n| Name | Reference Papers |\n|---|---|\n| [**AngularLoss**](x) |\n"
    "| [**VICRegLoss**](x) |\n\n### [Miners](x)\n",
    "docs/losses.md": "# Losses\nUsed so.\n\n## AngularLoss \nOld.\n\n\n## VICRegLoss\nOld.\n",
    "docs/distributed.md": "# Distributed\n\n## DistributedLossWrapper \nOld.\n",
    "mkdocs.yml": "nav:\n    - Home: index.md\n    - Utils:\n      - Distributed: distributed.md\n",
}


def pml(folder: Path) -> Path:
    """A tree like PML's repository, from the installed package."""
    installed = Path(pytorch_metric_learning.__file__).parent
    shutil.copytree(
        installed, folder / upstream.SOURCE, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, text in DOCUMENTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def place(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "upstream.py"), str(tree), *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def contents(tree: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(tree): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pml(tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = pml(tmp_path_factory.mktemp("placed"))
    done = place(tree)
    assert done.returncode == 0, done.stderr
    return tree


def new_modules(before: Path, placed: Path) -> list[Path]:
    new = contents(placed).keys() - contents(before).keys()
    return sorted(path for path in new if path.is_relative_to(upstream.SOURCE))


def run(tree: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in the tree, as PML's workflow runs its tests."""
    settings = {"PYTHONPATH": str(tree / "src"), "TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, *arguments],
        cwd=tree,
        env={**os.environ, **settings, "TEST_DTYPES": "float32,float64"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_every_module_has_a_place() -> None:
    modules = {path.stem for path in upstream.LIBRARY.glob("*.py")} - {"__init__"}
    assert set(upstream.PLACES) == modules - upstream.LEFT_OUT
    assert modules > upstream.LEFT_OUT


def test_every_public_module_has_unit_tests() -> None:
    public = set(upstream._public_names((upstream.LIBRARY / "__init__.py").read_text()).values())
    for name in public:
        folder, file = upstream.PLACES[name].path.split("/")
        assert (upstream.TESTS / folder / f"test_{file}.py").exists(), name


def test_only_lines_are_added(before: Path, placed: Path) -> None:
    after = contents(placed)
    changed = set()
    for path, old in contents(before).items():
        if after[path] != old:
            changed.add(path)
            lines = difflib.ndiff(old.decode().splitlines(), after[path].decode().splitlines())
            assert not [line for line in lines if line.startswith("- ")], path
    assert changed == ADDED_TO


def test_each_public_name_is_described_once(placed: Path) -> None:
    text = "".join(path.read_text() for path in (placed / "docs").iterdir())
    for name in ("HORDELoss", "EnergyConfusionRegularizer", "EmbeddingHead", "DistributedLoss"):
        assert text.count(f"\n## {name}\n") == 1
    assert "losses.HORDELoss(loss, in_channels, embedding_size, *, order=5" in text
    assert upstream_lower.LIBRARY not in text
    losses = (placed / "docs" / "losses.md").read_text()
    order = ["AngularLoss", "BinomialDevianceLoss", "HORDELoss", "VICRegLoss"]
    assert sorted(order, key=lambda name: losses.index(f"## {name}")) == order


def test_second_run_changes_nothing(placed: Path) -> None:
    old = contents(placed)
    done = place(placed)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["0", "files,"])
    assert contents(placed) == old


def test_dry_run_writes_nothing(before: Path) -> None:
    old = contents(before)
    done = place(before, "--dry-run")
    assert done.returncode == 0
    assert f"add {NEW}" in done.stdout.splitlines()
    assert f"add lines to {INIT}" in done.stdout.splitlines()
    assert contents(before) == old


def other_file(tree: Path) -> None:
    (tree / NEW).write_text("another HORDE\n")


def other_export(tree: Path) -> None:
    with (tree / INIT).open("a") as file:
        file.write("from .other import HORDELoss\n")


def other_section(tree: Path) -> None:
    with (tree / "docs" / "losses.md").open("a") as file:
        file.write("\n## HORDELoss\nAnother.\n")


def no_package(tree: Path) -> None:
    shutil.rmtree(tree / "src")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_file, "horde_loss.py: is there with another content"),
        (other_export, "HORDELoss is there already, from other.py"),
        (other_section, "losses.md: it has another section HORDELoss"),
        (no_package, "expected a source tree of pytorch_metric_learning"),
    ],
)
def test_refuses(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    tree = pml(tmp_path)
    spoil(tree)
    old = contents(tree)
    done = place(tree)
    assert done.returncode == 2
    assert message in done.stderr
    assert contents(tree) == old


def test_writes_all_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        upstream.write(tmp_path, {Path("a.py"): "fine", Path("b.py"): "\ud800"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_unit_tests_and_examples_pass(before: Path, placed: Path) -> None:
    examples = [str(path) for path in new_modules(before, placed)]
    options = ("-q", "-p", "no:cacheprovider", "--doctest-modules")
    done = run(placed, sys.executable, "-m", "pytest", *options, "tests", *examples)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 60


@pytest.mark.skipif("UPSTREAM_PYTHON" not in os.environ, reason="UPSTREAM_PYTHON: no old Python")
def test_unit_tests_pass_on_the_oldest_python_and_torch(placed: Path) -> None:
    """UPSTREAM_PYTHON is an interpreter with PML's oldest torch, as docs/upstream.md says."""
    python = os.environ["UPSTREAM_PYTHON"]
    done = run(placed, python, "-m", "unittest", "discover", "-t", ".", "-s", "tests")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_each_module_can_be_imported_first(before: Path, placed: Path) -> None:
    """PML's `losses` and `utils` import each other, so that the order may matter."""
    paths = [*new_modules(before, placed), INIT, INIT.parent.parent / "utils" / "distributed.py"]
    names = [".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__") for path in paths]
    script = (
        "import importlib, os, sys, scipy.stats, sklearn.metrics, torch.fx\n"
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0, name\n"
    )
    done = run(placed, sys.executable, "-W", "ignore", "-c", script, *names)
    assert done.returncode == 0, done.stderr


def test_lints_and_parses(before: Path, placed: Path) -> None:
    """Uses PML's flake8, without E501 and E741, black's line length and isort's order."""
    new = contents(placed).keys() - contents(before).keys()
    files = [str(placed / path) for path in new if path.suffix == ".py"]
    assert len(files) > 30
    shared = ("--isolated", "--no-cache", "--line-length=88", "--target-version=py38", *files)
    rules = ("--select=E,F,W,I", "--ignore=E501,E741")
    for command in (["check", *rules], ["format", "--check"]):
        done = run(placed, sys.executable, "-m", "ruff", *command, *shared)
        assert done.returncode == 0, done.stdout
    for file in files:
        ast.parse(Path(file).read_text(), feature_version=upstream.OLDEST_PYTHON)


SOURCE = '''"""An example, see `moments.py`."""

from collections.abc import Callable
from typing import Self

import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.utils import common_functions as c_f

from .moments import positions

Weight = float | Callable[[int], tuple[float, ...]]


def widest(x, others):  # keeps its comment
    """
    >>> from pml_regularizers import HORDELoss, EmbeddingHead
    """
    with torch.autocast(x.device.type, enabled=False):
        x = torch.minimum(x.unflatten(0, (2, 3)).amax(dim=1), x)
        return c_f.to(zip(x, others, strict=True))
'''
LOWERED = '''"""An example, see `high_order_moments.py`."""

from __future__ import annotations


from typing import Callable


import torch
from .contrastive_loss import ContrastiveLoss
from ..utils import common_functions as c_f

from ..utils.high_order_moments import positions
from ..utils import torch_compat
from typing import TYPE_CHECKING
import typing

if TYPE_CHECKING:
    from typing import Self

Weight = typing.Union[float, Callable[[int], typing.Tuple[float, ...]]]


def widest(x, others):  # keeps its comment
    """
    >>> from pytorch_metric_learning.losses import HORDELoss
    >>> from pytorch_metric_learning.utils.embedding_head import EmbeddingHead
    """
    with torch_compat.autocast(x.device.type, enabled=False):
        x = torch_compat.minimum(torch_compat.amax(torch_compat.unflatten(x, 0, (2, 3)), dim=1), x)
        return c_f.to(zip(x, others))
'''


def test_lowering() -> None:
    module = upstream_lower.Module("losses", "example")
    text = upstream_lower.lower(
        SOURCE, module, upstream.MODULES, {"ContrastiveLoss": "contrastive_loss"}
    )
    exports = {"HORDELoss": upstream.LOSSES, "EmbeddingHead": upstream.MODULES["heads"]}
    text = upstream_lower.rename(text, upstream.MODULES, exports)
    assert [line for line in text.splitlines() if line] == [
        line for line in LOWERED.splitlines() if line
    ]


@pytest.mark.parametrize(
    "line",
    [
        "from typing import override",
        "import pytorch_metric_learning.losses",
        "from pytorch_metric_learning.losses import NoSuchLoss",
    ],
)
def test_what_cannot_be_lowered_is_refused(line: str) -> None:
    module = upstream_lower.Module("losses", "example")
    with pytest.raises(upstream_lower.CannotLowerError, match="line 3"):
        upstream_lower.lower(f'"""Title."""\n\n{line}\n', module, upstream.MODULES, {})


def test_section_of_a_docstring() -> None:
    node = ast.parse(
        "def f(x: int, *, y: str = 'a') -> None:\n"
        '    """One sentence.\n\n    Args:\n        x: A number\n            on two lines.\n\n'
        '    Default: none.\n    """\n'
    ).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert upstream_docs.section(node, "utils.f", "[P](u)", "    a = b") == (
        "## f\n[P](u){target=_blank}\n\n```python\nutils.f(x, *, y='a')\n```\n\n"
        "One sentence.\n\nDefault: none.\n\n**Equation**:\n\n    a = b\n\n"
        "**Parameters**:\n\n* **x**: A number on two lines.\n"
    )
