"""The list of recipes: every row, with the paper's result and the length of its training."""

from benchmarks.reporting import recipe_list
from benchmarks.settings import read_table


def test_the_list_has_every_row(monkeypatch):
    tables = ["glyphs/demo", "horde/table2"]
    monkeypatch.setattr(recipe_list, "table_names", lambda: tables)
    lines = recipe_list.recipe_table().splitlines()
    rows = [line.split() for line in lines[1:] if line.startswith("  ")]
    names = [entry.name.split("/")[2] for of in tables for entry in read_table(of).entries]
    assert sorted(row[0] for row in rows) == sorted(names)
    start = lines.index("glyphs/demo: glyphs, test_resnet")
    assert lines[start + 1].split() == ["binomial", "96,000"]
