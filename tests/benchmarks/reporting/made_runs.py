"""Run folders of a report, and what its Markdown holds."""

import re
from pathlib import Path
from typing import Any

from benchmarks.records.steps import StepTables
from tests.benchmarks.made import write_record

DATA = {
    **{"name": "glyphs", "fingerprint": "abc", "split": "test"},
    **{"train_classes": 20, "test_classes": 1075, "train_images": 240, "test_images": 12900},
}
CONFIG: dict[str, Any] = {"optimizer": {"lr": 0.003, "note": "<b>not html</b>"}}
METRICS = {
    "recall_at_1": "Recall@1",
    "recall_at_2": "Recall@2",
    "recall_at_4": "Recall@4",
    "recall_at_8": "Recall@8",
    "mean_average_precision_at_r": "MAP@R",
    "r_precision": "R-precision",
}


def metrics(recall: float) -> dict[str, float]:
    """Every metric at its own distance from Recall@1, so that no two columns can be swapped."""
    return {key: recall + 0.01 * i for i, key in enumerate(METRICS)}


def write_run(parent: Path, label: str, seed: int, recall: float, /, **changes: Any) -> Path:
    """A finished run folder; `changes` replace entries of its run.json."""
    info = {
        **{"label": label, "seed": seed, "config": CONFIG, "commit": "0123abc", "dirty": True},
        **{"data": DATA, "steps": 1500, "metrics": metrics(recall)},
    }
    return write_record(parent / f"{label}-{seed}", **info | changes)


def add_curves(folder: Path) -> None:
    records = StepTables(folder / "records")
    records.log_rows("training", [(step, {"loss": 1 / step}) for step in range(1, 151)])
    for step in (50, 100, 150):
        recalls = {"seen_recall_at_1": step / 200, "unseen_recall_at_1": step / 300}
        records.log_rows("evaluation", [(step, recalls)])


def table(markdown: str, number: int = 0) -> list[dict[str, str]]:
    """The rows of one of the markdown's tables, by column name."""
    block = re.findall(r"(?:^\|.*\|\n?)+", markdown, flags=re.MULTILINE)[number]
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in block.splitlines()]
    header, _, *rows = lines
    return [dict(zip(header, row, strict=True)) for row in rows]


def all_rows(markdown: str) -> list[dict[str, str]]:
    return [row for number in range(markdown.count("| :--")) for row in table(markdown, number)]
