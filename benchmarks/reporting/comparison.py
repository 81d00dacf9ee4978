"""Comparison of methods: one row per label, paired differences, and notes that explain them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from benchmarks.records import Run, has_diverged
from benchmarks.reporting.paired import Metrics, Rows, differences, estimate, percent, values_of
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

TESTED_ON = ("name", "split", "fold", "fingerprint", "test_classes", "test_images", "view")
"""Facts about the data that must be equal in one table."""


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
    finished = {label: [r for r in of if not has_diverged(r.info)] for label, of in given.items()}
    methods = {label: of for label, of in finished.items() if of}
    first = next(iter(methods.values()))[0]
    baseline = first.label if baseline is None else baseline
    if baseline not in methods:
        raise ValueError(
            f"baseline: no finished run has the label {baseline!r}; there are {list(methods)}"
        )

    rows: Rows = {}
    lost: dict[str, list[int]] = {}
    for label, of in given.items():
        diverged = [run.seed for run in of if has_diverged(run.info)]
        rows[label], lost[label] = {}, diverged
        for run in finished[label]:
            rows[label][run.seed] = run.info["metrics"]
            for output, found in run.info.get("outputs", {}).items():
                if output != "parts":  # galleries of a part of the images: not comparable
                    name = f"{label} †" if output == "descriptor" else f"{label}: {output}"
                    rows.setdefault(name, {})[run.seed] = found
                    lost[name] = diverged

    start = _before_training(methods)
    shown = [*rows.items(), *start.items()]
    counts = {len(seeds) for seeds in rows.values()}
    told = {
        "± is the half-width of the 95 % Student-t interval over seeds.": max(counts) > 1,
        "A row of one seed has no interval: it cannot separate a method from chance.": 1 in counts,
        DESCRIPTOR: any(name.endswith("†") for name in rows),
        BEFORE: start,
    }
    notes = [
        f"{run.label}, seed {run.seed}, diverged: {run.info.get('error')}"
        for run in runs
        if has_diverged(run.info)
    ]
    notes += [note for note, holds in told.items() if holds]

    keys, reference = list(first.info["metrics"]), rows[baseline]
    metrics = Table(
        ["method", *(f"{metric_name(key)} (%)" for key in keys), "seeds"],
        [
            [name, *(percent(values_of(seeds, key)) for key in keys)]
            + [count_of_seeds(len(seeds), lost.get(name, ()))]
            for name, seeds in shown
        ],
        best=_best(rows, keys),
    )
    below = [
        ["", *(percent(differences(seeds, reference, key), "+", "") for key in keys), ""]
        for _, seeds in shown
    ]
    title = f"Difference to {baseline}, same seeds, in percentage points"
    paired, result = difference_table(rows, baseline), _result(rows, baseline, keys[0])
    blocks = [result, metrics, *([f"### {title}", paired] if paired else []), *notes]
    return Report(_heading(methods), blocks, methods, result, metrics, below, title, notes)


def _before_training(methods: Mapping[str, Sequence[Run]]) -> Rows:
    """The tests of the untrained networks: a row for all methods if these start with the same one."""
    starts: Rows = {}
    for label, members in methods.items():
        found = {run.seed: run.info.get("before_training") or {} for run in members}
        if found := {seed: metrics for seed, metrics in found.items() if metrics}:
            starts[label] = found
    merged: dict[int, Metrics] = {}
    for found in starts.values():
        for seed, metrics in found.items():
            if merged.setdefault(seed, metrics) != metrics:
                return {f"{label}: before training": rows for label, rows in starts.items()}
    return {"before training": merged} if merged else {}


def _best(rows: Rows, keys: Sequence[str]) -> frozenset[tuple[int, int]]:
    """(row, column) of the highest mean of each column, and of means that print the same."""
    found = set()
    for column, key in enumerate(keys, start=1) if len(rows) > 1 else ():
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
            said.append(f"{label} {found.percent('+')} points ({pairs}: {verdict})")
    if said:
        return f"{name} compared with {baseline}: {'; '.join(said)}."
    return f"{name} of {baseline}: {percent(values_of(rows[baseline], key))} %."


def _group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Label -> runs, in the given order; a ValueError if they cannot be in one table."""
    given: dict[str, list[Run]] = {}
    first = next((run for run in runs if run.info["status"] == "finished"), runs[0])
    for run in runs:
        diverged = has_diverged(run.info)
        if run.info["status"] != "finished" and (run is first or not diverged):
            told = f"diverged ({run.info.get('error')})" if diverged else repr(run.info["status"])
            raise ValueError(
                f"{run.folder}: the run is {told}, not finished; continue it with --resume, or leave it out"
            )
        check_alike(first, run)
        for other in given.setdefault(run.label, []):
            if other.seed == run.seed:
                raise ValueError(
                    f"{run.folder}: label {run.label!r} already has seed {run.seed} in {other.folder}; "
                    "pass each seed once"
                )
            if other.info["steps"] != run.info["steps"]:
                raise ValueError(
                    f"{run.folder}: {run.info['steps']} steps, but {other.info['steps']} in "
                    f"{other.folder} of the same label {run.label!r}; give them different labels"
                )
        given[run.label].append(run)
    return given


def check_alike(first: Run, run: Run, keys: Sequence[str] = TESTED_ON) -> None:
    """Raise a ValueError unless both were tested on the same data, by the same metrics."""
    for key in keys:
        expected, got = first.info["data"].get(key), run.info["data"].get(key)
        if got != expected:
            raise ValueError(
                f"{run.folder}: data {key} is {got!r}, but {expected!r} in {first.folder}; "
                "only runs tested on the same data can be compared"
            )
    if has_diverged(run.info):
        return
    if run.info["metrics"].keys() != first.info["metrics"].keys():
        raise ValueError(
            f"{run.folder}: measured {sorted(run.info['metrics'])}, but {first.folder} "
            f"{sorted(first.info['metrics'])}; test both with the same evaluation settings"
        )


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
