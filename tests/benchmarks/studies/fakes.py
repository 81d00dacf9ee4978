"""Records and trainings in place of real runs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.records.files import write_json
from benchmarks.studies.jobs import Job
from tests.benchmarks.made import RECORD

RECIPE = "glyphs/demo/binomial"
TINY = [
    *("--data.max_classes=8", "--data.batch_size=20", "--data.folds=2", "--optimization.steps=2"),
    *("--evaluation.every=1", "--evaluation.curve_classes=2", "--report=false"),
]

SPACE = """
optimization.learning_rate: {low: 1e-4, high: 1e-2, log: true}
losses[0].loss.init_args.alpha: {low: 1.0, high: 4.0}
model.embedding_size: {low: 16, high: 64, int: true}
model.pool: {choices: [avg, max]}
"""


class Ended:
    """A process that has ended when it is looked at, in place of a run's."""

    def __init__(self, poll: Callable[[], int]) -> None:
        self.poll = poll

    def terminate(self) -> None:
        pass


class Trainings:
    """In place of `Launcher.place`: `run.json` as a run leaves it, its value a function of settings and fold.

    Args:
        end: Called with the number of a run before it ends; returns its status, and may raise, as a kill would.
    """

    def __init__(self, end: Callable[[int, Job], str] = lambda number, run: "finished") -> None:
        self.started: list[Job] = []
        self.end = end

    def __call__(self, run: Job) -> Ended:
        self.started.append(run)
        config = run.config
        run.folder.mkdir(parents=True, exist_ok=True)
        record = record_of(config, value_of(config))
        write_json(run.folder / "run.json", record | {"status": "running"})
        run.log.write_text("training\n")
        number = len(self.started)

        def end() -> int:
            record["status"] = self.end(number, run)
            if record["status"] == "failed":
                record["error"] = "the loss is nan at step 7"
            write_json(run.folder / "run.json", record)
            return {"finished": 0, "failed": 1}.get(record["status"], -9)

        return Ended(end)


def value_of(config: dict[str, Any]) -> float:
    rate = config["optimization"]["learning_rate"]
    alpha = config["losses"][0]["loss"].get("init_args", {}).get("alpha", 2.0)
    return float(0.5 - (np.log10(rate) + 3) ** 2 / 10 - alpha / 100 + config["data"]["fold"] / 10)


def record_of(config: dict[str, Any], value: float, **changes: Any) -> dict[str, Any]:
    data = config["data"]
    fold = {"split": data["split"], "fold": f"{data['fold']} of {data['folds']}", "view": None}
    metrics = {"recall_at_1": value, "mean_average_precision_at_r": value / 2}
    selection = {"metric": "mean_average_precision_at_r", "step": 2, "value": value}
    about = {"label": config["label"], "seed": config["seed"], "steps": 2, "config": config}
    found = {"data": RECORD["data"] | fold, "metrics": metrics, "selection": selection}
    return RECORD | about | found | changes
