"""Comparison of methods: one row per label, paired differences, and notes that explain them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from benchmarks.records import Run, has_diverged
from benchmarks.reporting.paired import Rows, differences, estimate, percent, values_of
from benchmarks.reporting.rows import Group, check_alike
from benchmarks.reporting.table import Page, Table, count_of_seeds

NAMES = {
    "mean_average_precision_at_r": "MAP@R",
    "r_precision": "R-precision",
    "ideal_joint_error": "ideal joint error",
    "h_divergence": "H-divergence",
}

SPLITS = {"test": "unseen test classes", "validation": "unseen validation classes"}

DESCRIPTOR = (
    "† the test-time descriptor of the same training: the embeddings of all orders concatenated, "
    "reduced by PCA."
)

BEFORE = "before training: the network at its start, tested likewise."


@dataclass(frozen=True)
class Report(Page):
    """A comparison of methods as a page, and its parts for HTML."""

    methods: dict[str, list[Run]]
    result: str
    metrics: Table
    below: list[list[str]]  # the difference of each of its cells
    differences: str  # their heading
    notes: list[str]


def compare(runs: Sequence[Run], baseline: str | None = None) -> Report:
    """Compare finished runs, one row per label; differences are to the baseline's row.

    A run that diverged is counted and named in its row.

    Raises:
        ValueError: if a run is neither finished nor diverged, if none is finished, the runs' data or metrics
            differ, one label has a seed twice or unequal numbers of steps, or no run has the baseline's label.
    """
    given = _group(runs)
    methods = {label: group.runs for label, group in given.items() if group.runs}
    first = next(iter(methods.values()))[0]
    baseline = first.label if baseline is None else baseline
    if baseline not in methods:
        raise ValueError(
            f"baseline: no finished run has the label {baseline!r}; there are {list(methods)}"
        )
    rows: Rows = {}
    counts: dict[str, list[str]] = {}
    for label, group in given.items():
        names = {"embedding": label, "descriptor": f"{label} †"}
        for output, seeds in group.outputs.items():
            if output != "parts":  # galleries of a part of the images: not comparable
                name = names.get(output, f"{label}: {output}")
                lost = [run.seed for run in group.diverged]
                rows[name], counts[name] = seeds, [count_of_seeds(len(seeds), lost)]
    keys, sizes = list(first.info["metrics"]), {len(seeds) for seeds in rows.values()}
    start = _before_training(methods)
    told = {
        "± is the half-width of the 95 % Student-t interval over seeds.": max(sizes) > 1,
        "A row of one seed has no interval: it cannot separate a method from chance.": 1 in sizes,
        DESCRIPTOR: any(name.endswith("†") for name in rows),
        BEFORE: start,
    }
    notes = [
        f"{run.label}, seed {run.seed}, diverged: {run.info.get('error')}"
        for run in runs
        if has_diverged(run.info)
    ]
    notes += [note for note, holds in told.items() if holds]

    counts |= {name: [f"{len(seeds)}"] for name, seeds in start.items()}
    metrics = metric_table(rows | start, ["seeds"], counts, best=_best(rows, keys))
    below = [
        ["", *(percent(differences(seeds, rows[baseline], key), "+", "") for key in keys), ""]
        for seeds in (rows | start).values()
    ]
    title = f"Difference to {baseline}, same seeds, in percentage points"
    paired, result = difference_table(rows, baseline), _result(rows, baseline, keys[0])
    blocks = [result, metrics, *([f"### {title}", paired] if paired else []), *notes]
    return Report(_heading(methods), blocks, methods, result, metrics, below, title, notes)


def _group(runs: Sequence[Run]) -> dict[str, Group]:
    """Label -> runs; a ValueError if they cannot be in one table."""
    first = next((run for run in runs if run.info["status"] == "finished"), runs[0])
    for run in runs:
        diverged = has_diverged(run.info)
        if run.info["status"] != "finished" and (run is first or not diverged):
            told = f"diverged ({run.info.get('error')})" if diverged else repr(run.info["status"])
            raise ValueError(
                f"{run.folder}: the run is {told}, not finished; continue it with --resume, or leave it out"
            )
        check_alike(first, run)
    labels = dict.fromkeys(run.label for run in runs)
    groups = {label: Group(run for run in runs if run.label == label) for label in labels}
    for label, group in groups.items():
        for older, run in group.replaced:
            raise ValueError(
                f"{run.folder}: label {label!r} already has seed {run.seed} in {older.folder}; pass each seed once"
            )
        for run in (members := [*group.runs, *group.diverged]):
            if run.info["steps"] != members[0].info["steps"]:
                raise ValueError(
                    f"{run.folder}: {run.info['steps']} steps, but {members[0].info['steps']} in "
                    f"{members[0].folder} of the same label {label!r}; give them different labels"
                )
    return groups


def metric_table(
    rows: Rows,
    header: Sequence[str],
    beside: Mapping[str, Sequence[str]],
    where: str = "",
    **how: Any,
) -> Table:
    """A column for each metric, the mean over seeds, and further cells beside them."""
    keys = next(list(metrics) for seeds in rows.values() for metrics in seeds.values())
    return Table(
        ["method", *(f"{where}{metric_name(key)} (%)" for key in keys), *header],
        [
            [name, *(percent(values_of(seeds, key)) for key in keys), *beside[name]]
            for name, seeds in rows.items()
        ],
        **how,
    )


def difference_table(rows: Rows, baseline: str) -> Table | None:
    """Each row minus the baseline, paired by seed; None if they share fewer than two seeds."""
    reference = rows[baseline]
    keys = list(next(iter(reference.values())))
    lines = []
    for name, seeds in rows.items():
        pairs = len(seeds.keys() & reference.keys())
        if name != baseline and pairs > 1:
            cells = [percent(differences(seeds, reference, key), "+") for key in keys]
            lines.append([name, *cells, str(pairs)])
    return Table(["method", *map(metric_name, keys), "pairs"], lines) if lines else None


def _before_training(methods: Mapping[str, Sequence[Run]]) -> Rows:
    """The tests of the untrained networks: a row for all methods if these start with the same one."""
    starts: Rows = {}
    for label, members in methods.items():
        for run in members:
            if metrics := run.info.get("before_training"):
                starts.setdefault(label, {})[run.seed] = metrics
    merged = {seed: metrics for found in starts.values() for seed, metrics in found.items()}
    if any(merged[seed] != of for found in starts.values() for seed, of in found.items()):
        return {f"{label}: before training": found for label, found in starts.items()}
    return {"before training": merged} if merged else {}


def _best(rows: Rows, keys: Sequence[str]) -> frozenset[tuple[int, int]]:
    """(row, column) of the highest mean of each column, and of means that print the same."""
    if len(rows) < 2:
        return frozenset()
    found = set[tuple[int, int]]()
    for column, key in enumerate(keys, start=1):
        means = [round(fmean(values_of(seeds, key) or [-inf]), 4) for seeds in rows.values()]
        found |= {(row, column) for row, mean in enumerate(means) if mean == max(means)}
    return frozenset(found)


def _result(rows: Rows, baseline: str, key: str) -> str:
    """The result in one sentence, by the first metric."""
    name, said = metric_name(key), []
    for label, seeds in rows.items():
        if values := differences(seeds, rows[baseline], key):
            found = estimate(values)
            clear = found.half_width is not None and abs(found.mean) > found.half_width
            verdict = ("higher" if found.mean > 0 else "lower") if clear else "undecided"
            pairs = "one seed" if len(values) == 1 else f"{len(values)} pairs of seeds"
            said.append(f"{found.percent('+')} points for {label} ({pairs}: {verdict})")
    if said:
        return f"{name} compared with {baseline}: {'; '.join(said)}."
    return f"{name} of {baseline}: {percent(values_of(rows[baseline], key))} %."


def metric_name(metric: str) -> str:
    """The column of a metric: "Recall@1" for "recall_at_1"."""
    return NAMES.get(metric, metric.replace("recall_at_", "Recall@"))


def _heading(methods: dict[str, list[Run]]) -> str:
    steps = [f"{members[0].info['steps']:,}" for members in methods.values()]
    if len(set(steps)) > 1:
        steps = [f"{of} ({label})" for of, label in zip(steps, methods, strict=True)]
    data = next(iter(methods.values()))[0].info["data"]
    return (
        f"{data['name']}: {SPLITS[data['split']]} "
        f"({data['test_classes']:,} classes, {data['test_images']:,} images) "
        f"after {', '.join(dict.fromkeys(steps))} steps"
    )
