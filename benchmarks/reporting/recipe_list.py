"""List of all recipes: dataset, backbone, the paper's result and the images of a training."""

from benchmarks.reporting.table import Table
from benchmarks.settings.data import Data
from benchmarks.settings.experiment import Optimization
from benchmarks.settings.model import Model
from benchmarks.settings.recipe_files import Entry, read_table, table_names

NOTE = """
Recall@1 is the paper's, in percent; the images are those that one training
sees. "= NAME": the row shares the training of that entry, which is one of the
same paper unless NAME says otherwise."""


def recipe_table() -> str:
    """The text that `benchmarks/run.py --list` prints."""
    entries = [entry for name in table_names() for entry in read_table(name).entries]
    header = ["PAPER/TABLE: dataset, backbone", "Recall@1", "images"]
    table = Table(header, [_row(entry) for entry in entries])
    first, *rows = table.terminal(width=200).splitlines()
    groups: dict[str, list[str]] = {}
    for entry, row in zip(entries, rows, strict=True):
        dataset = entry.settings.get("data", {}).get("dataset", Data.dataset)
        trunk = entry.settings.get("model", {}).get("trunk", Model.trunk)
        heading = f"{entry.name.rpartition('/')[0]}: {dataset}, {trunk}"
        groups.setdefault(heading, [heading]).append(row)
    return "\n\n".join([first, *map("\n".join, groups.values()), NOTE.strip()])


def _row(entry: Entry) -> list[str]:
    settings = entry.settings
    recall = entry.cells.get("embedding", {}).get("recall_at_1")
    row = [f"  {entry.name.rpartition('/')[2]}", "" if recall is None else f"{recall:.1f}"]
    if entry.training != entry.name:
        same = entry.training.removeprefix(f"{entry.name.partition('/')[0]}/")
        return [f"{row[0]} = {same}", row[1], ""]
    steps = settings.get("optimization", {}).get("steps", Optimization.steps)
    images = steps * settings.get("data", {}).get("batch_size", Data.batch_size)
    return [*row, f"{images:,}"]
