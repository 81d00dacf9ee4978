"""Answers a question by a study: chooses settings on validation classes, tests them once, writes a page.

    python -m benchmarks.study STUDY [--data.root DIR] [--jobs 2 | --ray [ADDRESS]] [--page-only]
        [-- --any.setting value]

STUDY is a name in benchmarks/recipes/studies, or a YAML file of your own: docs/protocols.md says what it holds.
Before the first test the plan is registered: its SHA-256 and the code's commit are written into the study's JSON
file, beside the page, which also keeps the results of all trainings. After a stop, the same command continues;
several commands may work on one study at once. A folder of settings that are not chosen any more is renamed
NAME.stale-N. Each run has one thread unless OMP_NUM_THREADS says otherwise.

Exit status: 1 if a run failed, 2 if the command cannot start, 128 + signal if it was stopped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Light: torch is imported when runs are planned.
from benchmarks import records, reporting, studies
from benchmarks.console import HelpFormatter, leave, signals_handled, split_settings
from benchmarks.settings import ConfigError, read_study, study_names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    path = {"type": Path, "metavar": "PATH"}
    parser.add_argument(
        "study", metavar="STUDY", help=f"a file, or one of {', '.join(study_names())}"
    )
    parser.add_argument("--data.root", dest="root", metavar="DIR", help="the folder of your images")
    studies.add_arguments(parser, "so many runs at once; default: 2, with --ray as many as fit")
    parser.add_argument("--runs", help="run folders; default: runs/studies/STUDY", **path)
    parser.add_argument("--output", help="the page; default: study.md in --runs", **path)
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    return parser


@signals_handled(leave)  # until there is a run that can save
def main(argv: Sequence[str] | None = None) -> int:
    argv, settings = split_settings(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        return _run(
            options, [*([f"--data.root={options.root}"] if options.root else []), *settings]
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    file = read_study(options.study)
    runs = options.runs or Path("runs") / "studies" / file.name
    output = options.output or runs / "study.md"
    if output.suffix != ".md" or output.is_dir():  # the kept results lie beside the page
        raise ConfigError(f"--output: expected a .md file, got {output}")
    results = studies.Results(output.with_suffix(".json"))
    study = studies.Study(file, results, runs, settings)
    studies.check(study)
    if fitted := studies.fitted(study):
        print(f"The folder has few classes: runs get {' '.join(fitted)}.")
        study = studies.Study(file, results, runs, [*settings, *fitted])
    study.keep_finished()
    tried: set[Path] = set()
    built: set[str] = set()
    while not options.page_only:
        queue = [job for job in study.missing() if job.folder not in tried]
        if not queue:
            break
        studies.try_out(queue, built)
        print(study.forecast(queue, options.jobs or 2))
        study.register(queue)
        launcher = studies.launcher(options, runs, jobs=2)
        stopped_by = studies.Queue(queue, launcher, redo_stale=True).run()
        print(studies.summary(queue))
        study.keep_finished()
        if stopped_by is not None:
            return 128 + stopped_by
        tried |= {job.folder for job in queue}
    found = study.found()
    findings = reporting.judge(file, found, registered=studies.registered(study, found))
    if not findings:
        told = (
            f"no comparison has both rows finished at {file.seeds.count} seeds, neither in {runs} nor in "
            f"{output.with_suffix('.json')}"
        )
        if options.page_only:
            raise ConfigError(f"--page-only: {told}; leave it out to train them")
        print(f"{told}; see above for what became of the runs", file=sys.stderr)
        return 1
    figures = {
        which: output.with_name(f"{output.stem}{suffix}.svg")
        for which, suffix in (("main", ""), ("mechanisms", "_mechanisms"))
    }
    page = reporting.study_page(
        file,
        findings,
        found,
        choices=[of for row in study.rows if (of := study.choices(row))],
        registration=studies.registration(study, found),
        figures={which: path.name for which, path in figures.items()},
    )
    drawn = {
        path: reporting.forest(file, findings, which)
        for which, path in figures.items()
        if path.name in page
    }
    for path, content in {output: page.encode(), **drawn}.items():
        records.replace_file(path, content)
    print(f"{page.partition(chr(10) + '## ')[0].strip()}\n\nPage: {output}")
    return int(any(job.folder in tried for job in study.missing()))


if __name__ == "__main__":
    sys.exit(main())
