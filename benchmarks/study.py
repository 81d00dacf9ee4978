"""Answers a question by a study: chooses settings on validation classes, tests them once, writes a page.

    python -m benchmarks.study STUDY [--data.root DIR] [--jobs 2 | --ray [ADDRESS]] [--seeds N]
        [--trackers NAMES] [--page-only | --finish] [-- --any.setting value]

STUDY is a name in benchmarks/recipes/studies, or a YAML file of your own: docs/protocols.md says what it holds.
Before the first test the plan is registered: its SHA-256 and the code's commit are written into the study's JSON
file, which also keeps the results of all trainings, and into --runs, so that a page drawn elsewhere knows them. The
JSON file lies beside the page; for the pages in docs/, in results/.
Trainings follow the order of the comparisons, so that --page-only shows the first ones while others run. After a
stop, rerun the same command to resume; several commands may work on one study at once. A folder of settings that
are out of date is renamed NAME.stale-N. Each run has one thread unless OMP_NUM_THREADS says otherwise.

Exit status: 1 if a run failed, 2 if the command cannot start, 128 + signal if it was stopped.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.arguments import (
    at_least,
    command_parser,
    refusing,
    split_settings,
    user_folder,
    user_path,
)
from benchmarks.console.writing import replace_file
from benchmarks.records.results import about_as_long, has_thresholds
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.study_reading import read_study, study_names
from benchmarks.studies.jobs import Job, trying_out, wait_for
from benchmarks.studies.launching import Launcher, add_arguments, make_launcher
from benchmarks.studies.owner import check_owner, own

if TYPE_CHECKING:
    from benchmarks.reporting.study_choice import Choice
    from benchmarks.studies.study import Study

PROTOCOLS = Path(__file__).parents[1] / "docs" / "protocols.md"
RESULTS = Path(__file__).parents[1] / "results"  # of the pages in docs/


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    whole = list(sys.argv[1:] if argv is None else argv)
    argv, settings = split_settings(whole)
    parser = command_parser("study", __doc__)
    add = parser.add_argument
    add("study", metavar="STUDY", help=f"a file, or one of {', '.join(study_names())}")
    add("--data.root", dest="root", metavar="DIR", help="the folder of your images")
    add_arguments(parser, "so many runs at once; default: 2, with --ray as many as fit")
    add("--runs", type=user_folder, metavar="PATH", help="run folders; default: runs/studies/STUDY")
    add("--output", type=user_path, metavar="PATH", help="the page; default: study.md in --runs")
    add("--seeds", type=at_least(2), metavar="N", help="test so many; default: those of STUDY")
    trackers = "of Accelerate, such as wandb or wandb,mlflow: they get the rows of every run"
    add("--trackers", metavar="NAMES", help=trackers)
    add("--page-only", action="store_true", help="train nothing")
    add("--finish", action="store_true", help="then train the recommended method on all classes")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.root is not None:
        settings = [f"--data.root={options.root}", *settings]
    if options.trackers is not None:
        settings = [f"--trackers=[{options.trackers.strip('[]')}]", *settings]
    return _run(options, settings, partial(_command, *split_settings(whole)))


def _command(argv: Sequence[str], settings: Sequence[str], *more: str) -> str:
    """The command that trains what is left, and draws the page anew, with more options."""
    words = [word for word in argv if word not in ("--page-only", "--finish")]
    behind = ["--", *settings] if settings else []
    return shlex.join(["python", "-m", "benchmarks.study", *words, *more, *behind])


def _run(options: argparse.Namespace, settings: Sequence[str], command: Callable[..., str]) -> int:
    if options.page_only and options.finish:
        raise ConfigError("--finish: trains, and --page-only does not; leave one out")
    file = read_study(options.study)
    if options.seeds:
        file = replace(file, seeds=replace(file.seeds, count=options.seeds))
    runs = options.runs or Path("runs") / "studies" / file.name
    output = options.output or runs / "study.md"
    if output.suffix != ".md" or output.is_dir():  # the kept results lie beside the page
        raise ConfigError(f"--output: expected a .md file, got {output}")
    check_owner(runs, options.study)
    launcher = make_launcher(options, runs, jobs=2)
    if not options.page_only:
        launcher.prepare(next(iter(file.rows.values())).recipe)

    from benchmarks.reporting.study_choice import choose
    from benchmarks.studies.auditing import check, fitted
    from benchmarks.studies.kept import Results
    from benchmarks.studies.study import Study

    published = output.resolve().is_relative_to(PROTOCOLS.parent)
    kept = (RESULTS / output.name if published else output).with_suffix(".json")
    results = Results(kept, runs)
    study = Study(file, results, runs, settings)
    check(study)
    if lowered := fitted(study):
        for few, setting in lowered.items():
            print(f"The folder has few {few}: runs get {setting}.")
        study = study.with_settings(*lowered.values())
    study.keep_finished()
    draw = partial(_draw, options, study, output, command)
    status = 0 if options.page_only else _train(options, study, launcher, draw)
    if status >= 128:
        return status
    if (measured := _measured(study)) is None:
        lacking = f"no comparison has both rows finished at {study.file.seeds.count} seeds"
        way = "; leave out --page-only to train them" if options.page_only else ""
        print(f"error: {lacking}, neither in {runs} nor in {results.path}{way}", file=sys.stderr)
        return 2 if options.page_only else 1
    if options.finish and status == 0:
        status = _finish(study, launcher, choose(*measured).row)
    for title, line in draw().items():
        print(f"{title}: {line}")
    return status


def _measured(study: "Study") -> Any:
    """The study, its findings and its results, for `choose`; None before there is a result for a page."""
    from benchmarks.reporting.study_choice import untrained_row
    from benchmarks.studies.auditing import judged

    found, findings = judged(study)
    file = study.final
    return (file, findings, found) if findings or untrained_row(file, found) else None


def _draw(
    options: argparse.Namespace, study: "Study", output: Path, command: Callable[..., str]
) -> dict[str, str]:
    """Write the page and print its answer; the commands to go on with, by what they do."""
    from benchmarks.reporting.study_choice import choose
    from benchmarks.reporting.study_page import study_files
    from benchmarks.studies.auditing import registration
    from benchmarks.studies.showing import own_parts

    if (measured := _measured(study)) is None:
        return {}
    file, findings, found = measured
    published = output.resolve().is_relative_to(PROTOCOLS.parent)
    choice = choose(*measured)
    steps = _next_steps(study, options, choice, command)
    mine = None if published else own_parts(study, found, choice, steps)
    told, files = study_files(
        *(output.stem, file, findings, found),
        tried={row: study.tried(row) for row in study.rows},
        registration=registration(study, found),
        protocols=os.path.relpath(PROTOCOLS, output.parent),
        # A published page names no folder of the machine that drew it.
        command=None if published else command(),
        own=mine,
    )
    if study.runs.is_dir():
        own(study.runs, options.study)
        study.results.share_plans()  # of a study that older code began, too
    for name, content in files.items():
        replace_file(output.with_name(name), content)
    print("\n".join([*told, *(mine.known if mine else ())]).replace("`", "").replace("**", ""))
    pages = f"{output.with_suffix('.html')}\nIn Markdown: {output}" if mine else f"{output}"
    print(f"\nPage: {pages}")
    return steps


def _next_steps(
    study: "Study", options: argparse.Namespace, choice: "Choice", command: Callable[..., str]
) -> dict[str, str]:
    """Commands that go on with the recommended row, by what they do; none without its runs."""
    from benchmarks.reporting.study_choice import MANY

    row, steps = choice.row, dict[str, str]()
    finished, thresholds = study.finish(row), list[str]()
    tests = [(job.folder, job.own_record() or {}) for job in study.tests(row) if job.is_finished()]
    if finished.is_finished():
        network, length = finished.folder, finished.experiment.optimization.steps
        for folder, record in reversed(tests):
            as_long = record.get("selection") is None or about_as_long(record, length)
            if as_long and has_thresholds(record):
                thresholds = ["--thresholds", f"{folder}"]
    elif tests:
        network, _ = tests[0]
        verb = "Fit" if row in study.file.untrained() else "Train"
        steps[f"{verb} the recommended method on all classes"] = command("--finish")
    else:
        return {}
    trusted = [word for module in finished.trusted for word in ("--trust", module)]
    words = ["python", "-m", "benchmarks.export", f"{network}", "--output", "exported"]
    words += [*thresholds, *trusted]
    steps["Export the recommended network"] = shlex.join(words)
    data = finished.experiment.data
    if data.dataset != "glyphs":
        words = ["python", "examples/search_folder.py", "exported", f"{data.root}", "QUERY.jpg"]
        steps["Search in a folder with it"] = shlex.join([*words, "--html", "neighbours.html"])
    if choice.needs_seeds(study.file) and not options.seeds:
        steps["Be surer, by more trainings"] = command("--seeds", f"{MANY}")
    return steps


def _finish(study: "Study", launcher: Launcher, row: str) -> int:
    """Train a row on all classes, unless that is done; the exit status."""
    from benchmarks.studies.queue import Queue

    job = study.finish(row)
    if job.is_finished():
        return 0
    verb = "Fitting" if row in study.file.untrained() else "Training"
    print(f"{verb} {row} on all classes ...", flush=True)
    list(trying_out([job]))
    queue = Queue(lambda: [job], 1, launcher, redo_stale=True)
    return queue.run() or int(job.outcome() != "finished")


def _train(
    options: argparse.Namespace, study: "Study", launcher: Launcher, draw: Callable[..., Any]
) -> int:
    """Run what is left, the untrained rows first, which make a first page; the exit status."""
    if not (left := study.left()):
        return 0
    print("Checking all settings ...", flush=True)
    untrained = [row for row in study.rows if row in study.file.untrained()]
    first = study.missing(untrained)
    checks = trying_out([job for job in left if job not in first])
    if first:
        list(trying_out(first))
        own(study.runs, options.study)
        print("Measuring the network before any training ...", flush=True)
        if (status := _work(study, launcher, untrained, checks)) >= 128:
            return status
        if status == 0 and draw():
            print("Trainings follow; this page stays if they are stopped.\n", flush=True)
    list(checks)  # those that were not made meanwhile
    if not (left := study.left()):
        return 0
    own(study.runs, options.study)
    at_once = f", {launcher.jobs} at a time" * (options.ray is None)
    print(f"Trainings left: {len(left)}{at_once}.", flush=True)
    return _work(study, launcher)


def _work(
    study: "Study",
    launcher: Launcher,
    rows: Sequence[str] | None = None,
    meanwhile: Iterator[object] | None = None,
) -> int:
    """Run what is left of some rows, comparison by comparison; the exit status."""
    from benchmarks.studies.queue import Queue

    failed: list[Job] = []

    def ready() -> "list[Job]":
        study.keep_finished()
        jobs = [job for job in study.missing(rows) if job not in failed]
        study.register(jobs)
        return jobs

    while ready():
        total = len(study.left() if rows is None else study.missing(rows))
        queue = Queue(ready, total, launcher, redo_stale=True, meanwhile=meanwhile)
        stopped = queue.run()
        study.keep_finished()
        if stopped:
            print(f"Trainings left: {len(study.left())}; rerun the same command to resume.")
            return stopped
        lost = [job for job in queue.jobs if job.outcome() != "finished"]
        in_use = [job for job in lost if job.status == "in use"]
        failed += [job for job in lost if job.status != "in use"]
        if in_use:
            print(f"Waiting for {len(in_use)} runs of another command ...", flush=True)
            wait_for(in_use)
    return int(any(study.results.of(job) is None for job in failed))


if __name__ == "__main__":
    sys.exit(main())
