"""Methods of runs on several folds and seeds, under the fair protocol: docs/protocols.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation.tester import cluster_metrics, measure
from benchmarks.records.files import damage_named
from benchmarks.records.results import Run, load_run
from benchmarks.records.run_folder import EMBEDDINGS
from benchmarks.reporting.comparison import compared, tested_text
from benchmarks.reporting.paired import Metrics, Rows
from benchmarks.reporting.rows import TESTED_ON, check_alike, check_method, differing_settings
from benchmarks.reporting.table import Page, Table, count_of_seeds

KINDS = {
    "validation": "*validation, cross-validated*: mean over the folds, on the classes that chose the weights",
    "single": "*test, single models*: mean over the models of the folds",
    "ensemble": "*test, ensemble*: the folds' embeddings, L2-normalised and concatenated",
}

SAME_DATA = tuple(key for key in TESTED_ON if key != "fold")


@dataclass(frozen=True)
class Method:
    """Results of `evaluate` in a folder."""

    folder: Path
    run: Run  # one of its runs, for their common facts
    folds: int
    dimension: int  # of a single model's embeddings
    numbers: Rows  # by kind and seed, of the seeds whose folds are all finished
    diverged: list[int]  # other seeds, of which a run diverged
    left_out: list[str]  # why other seeds are left out


def read_method(folder: Path) -> Method:
    """Load the results of an evaluation, and measure its ensembles.

    Raises:
        ValueError: if the folder holds none, or runs that do not belong together.
    """
    runs = [load_run(path.parent) for path in sorted(folder.glob("seed*-fold*/run.json"))]
    if not runs:
        raise ValueError(
            f"{folder}: found no run; expected a folder of python -m benchmarks.fair evaluate"
        )
    first = next((run for run in runs if run.outcome == "finished"), runs[0])
    config = first.info["config"]
    folds, dimension = config["data"]["folds"], 0
    numbers: Rows = {kind: {} for kind in KINDS}
    diverged, left_out = list[int](), list[str]()
    for seed in sorted({run.seed for run in runs}):
        models = [run for run in runs if run.seed == seed]
        finished = sum(run.outcome == "finished" for run in models)
        if finished != folds:
            lost = [run.folder.name for run in models if run.outcome == "diverged"]
            diverged += [seed] * bool(lost)
            left_out.append(
                f"{folder}: seed {seed} is left out, {finished} of its {folds} folds are finished"
                f"{', diverged: ' if lost else ''}{', '.join(lost)}."
            )
            continue
        for run in models:
            check_alike(first, run, SAME_DATA)
            check_method(first, run, "the runs of a method differ in seed and fold alone")
        selections = [run.info["selection"] for run in models]
        value = float(np.mean([selection["value"] for selection in selections]))
        numbers["validation"][seed] = {selections[0]["metric"]: value}
        metrics = [run.info["metrics"] for run in models]
        together, dimension = _ensemble(models)
        single = {key: float(np.mean([model[key] for model in metrics])) for key in metrics[0]}
        numbers["single"][seed] = single
        numbers["ensemble"][seed] = {key: together[key] for key in single}
    if not numbers["single"]:
        raise ValueError(
            f"{folder}: no seed has all its {folds} folds finished; evaluate it again "
            f"({' '.join(left_out)})"
        )
    return Method(folder, first, folds, dimension, numbers, diverged, left_out)


def _ensemble(runs: Sequence[Run]) -> tuple[Metrics, int]:
    """The metrics of the embeddings of all folds together, and the width of one fold's.

    The runs have tested the same images.
    """
    parts = []
    for run in runs:
        path = run.file(EMBEDDINGS)
        with damage_named(path), np.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        parts.append(normalize(arrays["embeddings"], dim=1))
    vectors, labels = torch.cat(parts, dim=1), arrays["labels"]
    settings = runs[0].info["config"]["evaluation"]
    metrics = measure(vectors, labels, settings["recall_at"], Ranking.of_arrays(arrays))
    if settings["clustering"]:
        metrics |= cluster_metrics(vectors, labels)
    return metrics, parts[0].shape[1]


def fair_comparison(methods: Sequence[Method], expected_seeds: int) -> str:
    """Compare methods in Markdown: a table for every kind of number, with differences paired by seed.

    Raises:
        ValueError: if they were not tested on the same data, or by the same metrics.
    """
    first = methods[0]
    for method in methods:
        check_alike(first.run, method.run, SAME_DATA)
        if method.folds != first.folds:
            raise ValueError(
                f"{method.folder}: {method.folds} folds, but {first.folds} in {first.folder}; only models trained "
                "on as many classes can be compared"
            )
    labels = [method.run.label for method in methods]
    names = {
        label if labels.count(label) == 1 else f"{label} ({method.folder})": method
        for label, method in zip(labels, methods, strict=True)
    }
    if len(names) < len(methods):
        raise ValueError(f"{first.folder}: pass each folder once")
    blocks: list[str | Table] = []
    for kind, heading in KINDS.items():
        together, beside = kind == "ensemble", dict[str, dict[str, str]]()
        for name, method in names.items():
            beside[name] = {
                "models": f"{method.folds} together" if together else f"1 (mean of {method.folds})",
                "dimensions": f"{method.dimension * (method.folds if together else 1)}",
                "seeds": count_of_seeds(len(method.numbers[kind]), method.diverged),
            }
        rows = {name: method.numbers[kind] for name, method in names.items()}
        where = "validation " if kind == "validation" else "test "
        blocks += [f"### {heading}", *compared(rows, next(iter(names)), beside, where)]
    blocks.append("± is the half-width of the 95 % Student-t interval over seeds.")
    fewest = min(len(method.numbers["single"]) for method in methods)
    if fewest < expected_seeds:
        seeds = "1 seed, which has no interval" if fewest == 1 else f"{fewest} seeds"
        blocks.append(f"Only {seeds}: fewer than the protocol's {expected_seeds}.")
    blocks += [line for method in methods for line in method.left_out]
    others = [differing_settings(first.run, method.run) for method in methods[1:]]
    if differing := dict.fromkeys(chain(*others)):
        blocks.append(f"Settings in which the methods differ: {', '.join(differing)}.")
    data = first.run.info["data"]
    title = (
        f"{data['name']}, fair protocol: {first.folds} folds of the training classes, tested on "
        f"unseen classes ({tested_text(data)})"
    )
    return Page(title, blocks).markdown()
