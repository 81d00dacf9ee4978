"""Compares finished runs: a markdown table on the terminal and one self-contained HTML file.

    python -m benchmarks.report RUN_FOLDER [RUN_FOLDER ...] [--output FILE.html] [--baseline LABEL]

Runs of one label are one method with several seeds. Their mean carries the half-width of its 95 %
Student-t interval; methods are compared by the paired differences of the seeds both of them have.
"""

import argparse
import html
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import figures
from benchmarks.records import replace_file
from benchmarks.results import Run, Table, estimate, load_run

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
TESTED_ON = ("name", "split", "fold", "fingerprint", "test_classes", "test_images", "view")
"""What is recorded of the data that has to be equal in one table."""


@dataclass(frozen=True)
class Comparison:
    """What markdown and HTML both say, and the runs by label that it rests on."""

    methods: dict[str, list[Run]]
    heading: str
    metrics: Table
    differences: Table | None
    baseline: str
    notes: list[str]


def markdown_table(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The comparison as markdown; see `compare` for arguments and errors."""
    comparison = compare(runs, baseline)
    parts = [f"## {comparison.heading}", comparison.metrics.markdown()]
    if comparison.differences:
        parts += [f"### {_differences_title(comparison)}", comparison.differences.markdown()]
    return "\n\n".join([*parts, *comparison.notes]) + "\n"


def compare(runs: Sequence[Run], baseline: str | None = None) -> Comparison:
    """Puts runs side by side, one row per label.

    Args:
        runs: Finished runs on the same data and split, with the same metrics.
        baseline: The label that differences and times refer to; default: the first run's.
    Raises:
        ValueError: if a run is not finished, the runs' data or metrics differ, one label has a seed
            twice or unequal numbers of steps, or no run has the baseline's label.
    """
    methods = _group(runs)
    baseline = runs[0].label if baseline is None else baseline
    if baseline not in methods:
        raise ValueError(f"baseline: no run has the label {baseline!r}; there are {list(methods)}")

    # Row name -> seed -> metrics; a method's descriptor is a row of its own.
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for label, members in methods.items():
        rows[label] = {run.seed: run.info["metrics"] for run in members}
        outputs = dict.fromkeys(o for run in members for o in run.info.get("outputs", {}))
        for output in outputs:
            if output == "parts":  # galleries of a part of the images: no number for these columns
                continue
            name = f"{label} †" if output == "descriptor" else f"{label}: {output}"
            rows[name] = {
                run.seed: run.info["outputs"][output]
                for run in members
                if output in run.info["outputs"]
            }

    times = _relative_times(methods, baseline)
    notes = []
    if any(len(seeds) > 1 for seeds in rows.values()):
        notes.append("± is the half-width of the 95 % Student-t interval over seeds.")
    if any(len(seeds) == 1 for seeds in rows.values()):
        notes.append("A row of one seed has no interval: it cannot tell a method from chance.")
    if any(name.endswith("†") for name in rows):
        notes.append(DESCRIPTOR)
    if times:
        notes.append(f"Time: training and testing, relative to {baseline}, on the same hardware.")
    elif len(methods) > 1:
        notes.append("Times are not compared: the runs had different hardware or processes.")

    keys = list(runs[0].info["metrics"])
    time_header = [f"time (× {baseline})"] if times else []
    metrics = Table(
        ["method", *(f"{metric_name(key)} (%)" for key in keys), "seeds", *time_header],
        [
            [name]
            + [_percent([m[key] for m in seeds.values() if key in m]) for key in keys]
            + [str(len(seeds))]
            + ([times.get(name, "")] if times else [])
            for name, seeds in rows.items()
        ],
    )
    return Comparison(
        methods, _heading(methods), metrics, paired_differences(rows, baseline), baseline, notes
    )


def _percent(values: Sequence[float], sign: str = "") -> str:
    return estimate(values).percent(sign) if values else "–"


def _group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Label -> runs, in the order given; raises where the runs may not stand in one table."""
    if not runs:
        raise ValueError("runs: none given; pass at least one run folder")
    methods: dict[str, list[Run]] = {}
    first = runs[0]
    for run in runs:
        if run.info["status"] != "finished" or not run.info["metrics"]:
            raise ValueError(
                f"{run.folder}: the run is {run.info['status']!r}, not finished; go on with it by "
                "--resume, or leave it out"
            )
        for key in TESTED_ON:
            expected, got = first.info["data"].get(key), run.info["data"].get(key)
            if got != expected:
                raise ValueError(
                    f"{run.folder}: data {key} is {got!r}, but {expected!r} in {first.folder}; "
                    "only runs tested on the same data can be compared"
                )
        if run.info["metrics"].keys() != first.info["metrics"].keys():
            raise ValueError(
                f"{run.folder}: measured {sorted(run.info['metrics'])}, but {first.folder} "
                f"{sorted(first.info['metrics'])}; test both with the same evaluation settings"
            )
        same = methods.setdefault(run.label, [])
        for other in same:
            if other.seed == run.seed:
                raise ValueError(
                    f"{run.folder}: label {run.label!r} has seed {run.seed} in {other.folder} "
                    "already; pass each seed once"
                )
            if other.info["steps"] != run.info["steps"]:
                raise ValueError(
                    f"{run.folder}: {run.info['steps']} steps, but {other.info['steps']} in "
                    f"{other.folder} of the same label {run.label!r}; give them different labels"
                )
        same.append(run)
    return methods


def metric_name(metric: str) -> str:
    """The column of a metric: "Recall@1" for "recall_at_1"."""
    return NAMES.get(metric, metric.replace("recall_at_", "Recall@"))


def _heading(methods: dict[str, list[Run]]) -> str:
    steps = {label: f"{members[0].info['steps']:,}" for label, members in methods.items()}
    if len(set(steps.values())) == 1:
        trained = f"{next(iter(steps.values()))} steps"
    else:
        trained = "unequal steps (" + ", ".join(f"{k}: {v}" for k, v in steps.items()) + ")"
    data = next(iter(methods.values()))[0].info["data"]
    return (
        f"{data['name']}: {SPLITS[data['split']]} "
        f"({data['test_classes']:,} classes, {data['test_images']:,} images) after {trained}"
    )


def _relative_times(methods: dict[str, list[Run]], baseline: str) -> dict[str, str]:
    """Mean wall time over the baseline's; {} for one method or for runs on unlike machines."""
    runs = [run for members in methods.values() for run in members]
    machine = [(run.info["hardware"], run.info["world_size"]) for run in runs]
    if len(methods) == 1 or any(other != machine[0] for other in machine):
        return {}
    seconds = {
        label: float(np.mean([run.info["wall_time_s"] for run in members]))
        for label, members in methods.items()
    }
    return {label: f"{value / seconds[baseline]:.2f}" for label, value in seconds.items()}


def paired_differences(rows: dict[str, dict[int, dict[str, float]]], baseline: str) -> Table | None:
    """Each row minus the baseline, paired by seed; None where no two seeds are shared."""
    reference = rows[baseline]
    keys = list(next(iter(reference.values())))
    lines = []
    for name, seeds in rows.items():
        common = sorted(seeds.keys() & reference.keys())
        if name == baseline or len(common) < 2:
            continue
        cells = [
            _percent([seeds[s][key] - reference[s][key] for s in common if key in seeds[s]], "+")
            for key in keys
        ]
        lines.append([name, *cells, str(len(common))])
    return Table(["method", *map(metric_name, keys), "pairs"], lines) if lines else None


def _differences_title(comparison: Comparison) -> str:
    return f"Difference to {comparison.baseline}, same seeds, in percentage points"


def write_html(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """Writes the report as one file that loads nothing; arguments and errors as `compare`."""
    comparison = compare(runs, baseline)
    methods = comparison.methods
    firsts = [members[0] for members in methods.values()]
    sections = [
        f"<h1>{html.escape(' vs. '.join(methods))}</h1>",
        f'<p class="lead">{html.escape(comparison.heading)}</p>',
        comparison.metrics.html(),
    ]
    if comparison.differences:
        title = html.escape(_differences_title(comparison))
        sections += [f"<h2>{title}</h2>", comparison.differences.html()]
    sections += [f'<p class="note">{html.escape(note)}</p>' for note in comparison.notes]
    sections += [
        "<h2>Curves</h2>",
        figures.curves(methods, comparison.baseline),
        *_section("Deep features and representations", map(figures.deep_features, firsts)),
        "<h2>Nearest neighbours</h2>",
        '<p class="note">Each row: a query, then its nearest neighbours, the nearest first. '
        '<span class="key right">✓ same class</span> (green, solid frame) '
        '<span class="key wrong">✗ another class</span> (red, dashed frame)</p>',
        *map(figures.retrieval_grids, firsts),
        *_section("Classes taken for one another", map(figures.confusion, firsts)),
        "<h2>What was run</h2>",
        *(_provenance(run) for run in runs),
    ]
    page = PAGE.replace("{title}", html.escape(" vs. ".join(methods)))
    replace_file(path, page.replace("{body}", "\n".join(sections)).encode())


def _section(title: str, parts: Iterable[str]) -> list[str]:
    """The parts below a heading; nothing where no run has one."""
    found = [part for part in parts if part]
    return [f"<h2>{title}</h2>", *found] if found else []


def _provenance(run: Run) -> str:
    """Where a run's numbers come from, folded away behind its label and seed."""
    info = run.info
    commit = info.get("commit") or "not known"
    entries = {
        "folder": str(run.folder),
        "recipe": info.get("recipe"),
        "command": info.get("command"),
        "commit": f"{commit} (with uncommitted changes)" if info.get("dirty") else commit,
        "seed": info["seed"],
        "steps": info["steps"],
        "processes": info.get("world_size"),
        "started": info.get("started"),
        "finished": info.get("finished"),
        "wall time": f"{info['wall_time_s']:,.0f} s, training and testing",
        "hardware": _listed(info.get("hardware", {})),
        "versions": _listed(info.get("versions", {})),
        "data": _listed(info["data"]),
    }
    rows = "".join(
        f"<dt>{key}</dt><dd>{html.escape(str(value))}</dd>"
        for key, value in entries.items()
        if value is not None
    )
    config = html.escape(yaml.safe_dump(info.get("config", {}), sort_keys=False))
    return (
        f"<details><summary>{html.escape(run.label)}, seed {run.seed}</summary><dl>{rows}</dl>"
        f"<details><summary>resolved configuration</summary><pre>{config}</pre></details></details>"
    )


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root { --ink: #1c1e21; --soft: #5c6470; --line: #d9dde3; --ground: #fff; --card: #f6f7f9;
  --right: #1a7f37; --wrong: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3af; --line: #343a43;
  --ground: #14171b; --card: #1c2026; --right: #3fb950; --wrong: #ff6a61; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; color: var(--ink);
  background: var(--ground); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.2rem; }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; }
h4 { margin: 1rem 0 .35rem; font-size: .875rem; font-weight: 600; color: var(--soft); }
.lead { margin: .4rem 0 1.5rem; }
figcaption b { color: var(--ink); font-weight: 600; }
.lead, .note, small, figcaption, dt { color: var(--soft); }
.note, figcaption { font-size: .875rem; margin: .5rem 0; }
.wide { overflow-x: auto; }
table { border-spacing: 0; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child { position: sticky; left: 0; text-align: left; background: var(--ground); }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; }
figure svg { display: block; width: 100%; height: auto; }
figure.broad { overflow-x: auto; margin-bottom: 1rem; }
figure.broad svg { min-width: 44rem; }
.grid { display: grid; gap: .25rem;
  grid-template-columns: repeat(var(--columns), minmax(2rem, 5rem)); }
.grid span { position: relative; border: 3px solid var(--line); border-radius: .3rem; }
.grid .right { border-color: var(--right); }
.grid .wrong { border: 3px dashed var(--wrong); }
.grid img { display: block; width: 100%; }
.grid b { position: absolute; right: -3px; bottom: -3px; padding: 0 .2em; font-size: .75rem;
  line-height: 1.3; color: var(--ground); border-radius: .3rem 0; }
.grid .right b { background: var(--right); }
.grid .wrong b { background: var(--wrong); }
.key { white-space: nowrap; font-weight: 600; }
.key.right { color: var(--right); }
.key.wrong { color: var(--wrong); }
details { margin: .5rem 0; padding: .5rem .75rem; background: var(--card); border-radius: .5rem; }
details details { padding: 0; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .75rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: .8rem; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
</style>
</head>
<body>
{body}
</body>
</html>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the markdown and the path of the HTML file; 2 if the runs cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="default: report.html in the run folder, comparison.html in the first of several",
    )
    parser.add_argument(
        "--baseline", metavar="LABEL", help="what to compare with; default: the first run's label"
    )
    options = parser.parse_args(arguments)
    # Not beside the run folders: `runs/*` would take it for one of them the next time.
    name = "report.html" if len(options.folders) == 1 else "comparison.html"
    output = options.output or options.folders[0] / name
    try:
        runs = [load_run(folder) for folder in options.folders]
        text = markdown_table(runs, options.baseline)
        write_html(runs, output, options.baseline)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"Report: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
