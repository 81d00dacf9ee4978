"""The list of recipes: every row, with the paper's result and the length of its training."""

import subprocess
import sys

from benchmarks.settings import recipe_names
from tests.support.processes import ROOT


def test_the_list_has_every_row_and_needs_no_network() -> None:
    code = (
        "import sys; from benchmarks import reporting; print(reporting.recipe_table())\n"
        "print({'torch', 'timm', 'accelerate', 'numpy', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == "set()"
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["PAPER/TABLE:", "dataset,", "backbone", "Recall@1", "images"]
    rows = [line.split() for line in lines if line.startswith("  ") and line.strip()]
    names = [name.rpartition("/")[2] for name in recipe_names()]
    assert sorted(row[0] for row in rows) == sorted(names)
    start = lines.index("glyphs/demo: glyphs, test_resnet")
    assert lines[start + 1].split() == ["binomial", "96,000"]
