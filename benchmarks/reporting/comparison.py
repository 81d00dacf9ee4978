"""Comparison of methods: one row per label, paired differences, and notes that explain them."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.datasets.queries import queries_text
from benchmarks.datasets.remarks import verify_command
from benchmarks.records.results import DONE, Run
from benchmarks.reporting.identification import identified
from benchmarks.reporting.names import START, UNTRAINED, metric_name, row_name
from benchmarks.reporting.paired import (
    Metrics,
    Rows,
    differences,
    estimate,
    percent,
    values_of,
)
from benchmarks.reporting.rows import Group, check_alike, check_method
from benchmarks.reporting.table import Page, Table, count_of_seeds
from benchmarks.reporting.untrained import best_untrained
from benchmarks.reporting.verification import verified

DESCRIPTOR = (
    "† the test-time descriptor of the same training: the embeddings of all orders concatenated, "
    "reduced by PCA."
)


def compare(runs: Sequence[Run], baseline: str | None = None) -> Page:
    """Compare finished runs, one row per label; differences are to the baseline's row.

    A run that diverged is counted and named.

    Raises:
        ValueError: if a run is neither finished nor diverged, if none is finished, the runs' data or metrics
            differ, one label has a seed twice or unequal settings, or is another row's name, or no run has the
            baseline's label.
    """
    groups = grouped(runs)
    labels = [label for label, group in groups.items() if group.runs]
    baseline = labels[0] if baseline is None else baseline
    if baseline not in labels:
        raise ValueError(
            f"baseline: no finished run has the label {baseline!r}; there are {labels}"
        )
    rows: Rows = {}
    beside: dict[str, dict[str, str]] = {}

    def add(name: str, found: dict[int, Metrics], lost: Sequence[int] = ()) -> None:
        if name in rows:
            run = [*groups[name].runs, *groups[name].diverged][0]
            raise ValueError(
                f"{run.folder}: the label {name!r} is also the name of another row of "
                "this report; leave the run out, or run it again with another label"
            )
        rows[name], beside[name] = found, {"seeds": count_of_seeds(len(found), lost)}

    for label, group in groups.items():
        for output, seeds in group.outputs.items():
            # Galleries of a part of the images are not comparable.
            if output != "parts" and not output.startswith(UNTRAINED):
                name = row_name(label, output, group.first["config"])
                add(name, seeds, [run.seed for run in group.diverged])
    first = groups[baseline].first
    sizes, result = {len(seeds) for seeds in rows.values()}, _result(rows, baseline, groups)
    for output, seeds in groups[baseline].outputs.items():
        if output.startswith(UNTRAINED):
            add(row_name(baseline, output, first["config"]), seeds)
    if start := {r.seed: r.info[START] for r in groups[baseline].runs if r.info.get(START)}:
        add(row_name(baseline, START), start)
    notes = [note for group in groups.values() for note in group.diverged_notes]
    notes += [
        f"{run.folder}: the loss was 0 in every step, so that it trained nothing; what moved is batch norm."
        for run in runs
        if run.info.get("never_acted")
    ]
    if copies := first["data"].get("test_copies"):
        notes += [
            f"{copies:,} of the {first['data']['test_images']:,} test images have a copy of their class, which a "
            "search finds whatever was learned. What to do is said by:",
            f"    {verify_command(first['config']['data'])}",
        ]
    if lost := first["data"].get("unanswered_validation_queries"):
        counts = queries_text(first["data"]["validation_queries"], lost)
        notes.append(f"The validation classes, which chose the step, have {counts}.")
    told = {
        "± is the half-width of the 95 % Student-t interval over seeds.": max(sizes) > 1,
        "A row of one seed has no interval: it cannot separate a method from chance.": 1 in sizes,
        DESCRIPTOR: any(name.endswith("†") for name in rows),
        "before training: the baseline's network at its start, tested likewise.": start,
    }
    notes += [note for note, holds in told.items() if holds]
    tables = [*compared(rows, baseline, beside), *verified(groups), *identified(groups)]
    return Page(_heading(groups), [result, *tables, *notes])


def grouped(runs: Sequence[Run]) -> dict[str, Group]:
    """Label -> runs; raises ValueError if they cannot be in one table."""
    first = next((run for run in runs if run.outcome == "finished"), runs[0])
    for run in runs:
        if run.outcome not in DONE or first.outcome == "diverged":
            told, way = run.outcome, "continue it with --resume"
            if told == "diverged":  # as it would again
                told, way = f"diverged ({run.info.get('error')})", "run it with other settings"
            raise ValueError(
                f"{run.folder}: the run is {told}, not finished; {way}, or leave it out"
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
            check_method(
                members[0], run, f"both have the label {label!r}; give them different ones"
            )
    return groups


def compared(
    rows: Rows, baseline: str, beside: Mapping[str, Mapping[str, str]], where: str = ""
) -> list[str | Table]:
    """The means over seeds, and what rows differ from the baseline, paired by seed.

    Rows that share fewer than two seeds with the baseline have no difference. `beside` has further columns of each
    row, and `where` stands before the names of metrics.
    """
    reference = rows[baseline]
    metrics = list(next(iter(reference.values())))
    means: list[list[str]] = []
    paired: list[list[str]] = []
    for name, seeds in rows.items():
        cells = [percent(values_of(seeds, metric)) for metric in metrics]
        means.append([name, *cells, *beside[name].values()])
        pairs = len(seeds.keys() & reference.keys())
        if name != baseline and pairs > 1:
            cells = [percent(differences(seeds, reference, metric), "+") for metric in metrics]
            paired.append([name, *cells, f"{pairs}"])
    names = [metric_name(metric) for metric in metrics]
    header = ["method", *(f"{where}{name} (%)" for name in names), *beside[baseline]]
    told = f"Difference to {baseline}, same seeds, in percentage points:"
    below: list[str | Table] = [told, Table(["method", *names, "pairs"], paired)] if paired else []
    return [Table(header, means), *below]


def _result(rows: Rows, baseline: str, groups: Mapping[str, Group]) -> str:
    """The result in a sentence, by the first metric, and what trainings lost against the untrained network."""
    reference = rows[baseline]
    key = next(key for metrics in reference.values() for key in metrics)
    name, said = metric_name(key), []
    for label, seeds in rows.items():
        values = differences(seeds, reference, key)
        if label != baseline and values:
            gain = estimate(values)
            clear = gain.half_width is not None and abs(gain.mean) > gain.half_width
            verdict = ("higher" if gain.mean > 0 else "lower") if clear else "undecided"
            pairs = "one seed" if len(values) == 1 else f"{len(values)} pairs of seeds"
            said.append(f"{gain.percent('+')} points for {label} ({pairs}: {verdict})")
    if groups[baseline].first["data"]["split"] == "all":
        name += " on the classes of the training"
    result = f"{name} of {baseline}: {percent(values_of(reference, key))} %"
    if said:
        result = f"{name} compared with {baseline}: {'; '.join(said)}"
    for label, group in groups.items():
        best = best_untrained(*(run.info for run in group.runs), metric=key)
        if lost := best and best.told(key):
            result += f"; {lost}" if len(groups) == 1 else f". {label}: {lost}"
    return f"{result}."


def _heading(groups: Mapping[str, Group]) -> str:
    infos = [run.info for group in groups.values() for run in group.runs]
    steps, data = dict.fromkeys(f"{info['steps'] or 0:,}" for info in infos), infos[0]["data"]
    split = data["split"]
    classes = "the classes of the training" if split == "all" else f"unseen {split} classes"
    if (known := data.get("known_classes")) is not None:
        classes = f"test classes, {known:,} of them trained on by other images,"
    return f"{data['name']}: {classes} ({tested_text(data)}) after {' or '.join(steps)} steps"


def tested_text(data: Mapping[str, Any]) -> str:
    """The numbers of a record's tested classes, images and queries; older code did not count the last."""
    counts = f"{data['test_classes']:,} classes, {data['test_images']:,} images"
    if "test_queries" not in data:
        return counts
    counts += f", {queries_text(data['test_queries'], data['unanswered_queries'])}"
    return f"{counts}; {data['leaving']}" if "leaving" in data else counts
