"""The list of recipes: every row, with the paper's result and the length of its training."""

from benchmarks.reporting import recipe_table
from benchmarks.settings import recipe_names


def test_the_list_has_every_row() -> None:
    lines = recipe_table().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["PAPER/TABLE:", "dataset,", "backbone", "Recall@1", "images"]
    rows = [line.split() for line in lines if line.startswith("  ") and line.strip()]
    names = [name.rpartition("/")[2] for name in recipe_names()]
    assert sorted(row[0] for row in rows) == sorted(names)
    start = lines.index("glyphs/demo: glyphs, test_resnet")
    assert lines[start + 1].split() == ["binomial", "96,000"]
