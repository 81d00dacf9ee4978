"""README's picture: one row a query, a column a run, and no run beside another one's queries."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.reporting import pictures
from tests.benchmarks.reporting.test_figures import run, save_retrieval
from tools.readme_picture import GAP, TITLE, draw


def test_both_runs_answer_the_same_queries(tmp_path: Path) -> None:
    picture = draw(
        [save_retrieval(tmp_path / name, right=row) for name, row in (("a", 0), ("b", 1))]
    )
    left, right = np.split(np.asarray(picture)[TITLE:], [(picture.width + GAP) // 2], axis=1)
    rows = [len(half) // 2 for half in (left, right)]
    found = [
        [(half[:row] == pictures.RIGHT).all(2).any(), (half[row:] == pictures.RIGHT).all(2).any()]
        for half, row in zip((left, right), rows, strict=True)
    ]
    assert found == [[True, False], [False, True]]
    assert (np.asarray(picture)[:TITLE] == 0).any(), "the runs' labels"


def test_other_queries_are_refused(tmp_path: Path) -> None:
    one, other = (save_retrieval(tmp_path / name, right=0) for name in "ab")
    arrays = pictures.saved(other.file("retrieval.npz"))
    np.savez(other.file("retrieval.npz"), **arrays | {"query_names": arrays["query_names"][::-1]})
    (tmp_path / "none").mkdir()
    for without in (other, run(tmp_path / "none")):
        with pytest.raises(ValueError, match=r"expected the same queries in all runs"):
            draw([one, without])
