"""The fair protocol beyond one run: search on validation classes, then test several seeds of every fold.

    python -m benchmarks.fair search RECIPE --space SPACE.yaml [--trials 50] [-- --any.setting value]
    python -m benchmarks.fair evaluate RECIPE [--config best.yaml] [--seeds 5] [-- --any.setting value]
    python -m benchmarks.fair compare FOLDER FOLDER [FOLDER ...]

After Musgrave, Belongie and Lim, "A Metric Learning Reality Check" (ECCV 2020): the training classes are cut into
4 folds, a model is trained on 3 of them and its weights are chosen by MAP@R on the other; settings are searched in
50 trials that see no test class; every model is tested once. Three kinds of number come of it, each with a table of
its own:

    validation, cross-validated    mean over the folds of a model's MAP@R on the fold that chose its weights
    test, single models            mean over the folds of what each model gives on the test classes
    test, ensemble                 the folds' embeddings, L2-normalised and concatenated: 4 models, 4 times as wide

Exit status: 2 for what cannot be started, 1 if a run failed, 128 + signal if it was stopped; the same command
goes on.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch.nn.functional import normalize

from benchmarks.command_line import at_least, split_settings
from benchmarks.config_changes import VOLATILE, config_changes
from benchmarks.errors import ConfigError
from benchmarks.evaluation import cluster_metrics, measure
from benchmarks.progress import progress_bar
from benchmarks.records import replace_file, write_json
from benchmarks.report import TESTED_ON, metric_name, paired_differences
from benchmarks.results import Run, Table, estimate, load_run
from benchmarks.run import EMBEDDINGS
from benchmarks.run_folder import RunFolderError
from benchmarks.subruns import Launcher, SubRun, check

SEEDS, TRIALS = 5, 50
OWN = (
    *("--recipe", "--config", "--resume", "--output", "--seed", "--protocol", "--data.split"),
    *("--data.fold", "--evaluation.save_embeddings", "--list", "--print_config"),
)
"""Options of `benchmarks/run.py` that this command sets or has itself."""
KINDS = {
    "validation": "*validation, cross-validated*: mean over the folds, on the classes that chose the weights",
    "single": "*test, single models*: mean over the models of the folds",
    "ensemble": "*test, ensemble*: the folds' embeddings, L2-normalised and concatenated",
}
MODELS = {"validation": "1 (mean of {})", "single": "1 (mean of {})", "ensemble": "{} together"}
ABOUT_THE_RUN = (*VOLATILE, "seed", "label", "data.fold")


def main(argv: Sequence[str] | None = None) -> int:
    argv, settings = split_settings(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(argv)
    try:
        if options.command == "compare":
            if settings:
                raise ConfigError(f"{settings[0]}: compare trains nothing and takes no settings")
            print(comparison([read_method(folder) for folder in options.folders]))
            return 0
        for option in settings:
            if option.partition("=")[0] in OWN:
                raise ConfigError(
                    f"{option}: not one of the settings behind --; see {options.command} --help"
                )
        settings = [f"--config={path}" for path in options.config] + settings
        return (_search if options.command == "search" else _evaluate)(options, settings)
    except (ConfigError, RunFolderError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("recipe", metavar="RECIPE", help="PAPER/TABLE/ROW")
    shared.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        help="a YAML file of settings; repeatable",
    )

    search = commands.add_parser(
        "search", parents=[shared], allow_abbrev=False, help="find settings on validation classes"
    )
    search.add_argument(
        "--space",
        type=Path,
        required=True,
        help="YAML: {setting: {low, high, log, int} or {choices}}",
    )
    search.add_argument(
        "--trials", type=at_least(1), default=TRIALS, help="fixed once begun; default %(default)s"
    )
    search.add_argument(
        "--fold",
        type=int,
        nargs="+",
        metavar="N",
        help="validate on these folds only; default: all, a training each, as the paper does, so that the "
        "settings fit no fold better than another",
    )
    search.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        help="of the sampler and the trainings; default %(default)s",
    )
    search.add_argument("--runs", type=Path, help="default: runs/search/RECIPE")

    evaluate = commands.add_parser(
        "evaluate", parents=[shared], allow_abbrev=False, help="train and test all seeds and folds"
    )
    evaluate.add_argument(
        "--seeds", type=at_least(1), default=SEEDS, help="0 to N - 1; default %(default)s"
    )
    evaluate.add_argument("--runs", type=Path, help="default: runs/fair/RECIPE")

    compare = commands.add_parser(
        "compare", allow_abbrev=False, help="evaluated methods side by side, and paired by seed"
    )
    compare.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    return parser


@contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Nobody else works in the folder meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout as error:
        raise ConfigError(
            f"--runs: {folder} is in use by another process; wait for it, or choose another"
        ) from error
    except OSError as error:
        raise ConfigError(f"--runs: {folder}: {error.strerror}") from error
    with lock:
        yield


def _folder(options: argparse.Namespace, kind: str) -> Path:
    folder: Path = options.runs or Path("runs") / kind / options.recipe.replace("/", "-")
    return folder


def _search(options: argparse.Namespace, settings: Sequence[str]) -> int:
    try:
        from benchmarks.search import Search, UnfinishedRunError
        from benchmarks.search_space import read_space
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(
            "search: Optuna is not installed; pip install '.[benchmarks,search]'"
        ) from error
    folder = _folder(options, "search")
    search = Search(
        options.recipe,
        settings,
        read_space(options.space),
        some_folds=options.fold,
        trials=options.trials,
        seed=options.seed,
        folder=folder,
    )
    with _exclusively(folder):
        try:
            return search.execute()
        except UnfinishedRunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


# ------------------------------------------------------------------------------------------ evaluate


def _evaluate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    folder = _folder(options, "fair")
    runs = evaluation_runs(options.recipe, settings, range(options.seeds), folder)
    with _exclusively(folder):
        failed, stopped_by = _train(runs)
        if stopped_by is not None:
            finished = sum(run.result() is not None for run in runs)
            print(f"\nstopped after {finished} of {len(runs)} runs; the same command goes on")
            return 128 + stopped_by
        for problem in failed:
            print(f"error: {problem}", file=sys.stderr)
        if len(failed) < len(runs):
            text = comparison([read_method(folder)])
            replace_file(folder / "summary.md", text.encode())
            print(text)
    return 1 if failed else 0


def _train(runs: Sequence[SubRun]) -> tuple[list[str], int | None]:
    """Run what is not finished; what failed and why, and the signal that stopped it."""
    waiting = [run for run in runs if run.result() is None]
    failed = []
    bar = progress_bar(total=len(runs), initial=len(runs) - len(waiting), desc="runs", unit="run")
    with Launcher() as launcher, bar:
        for run in waiting:
            launcher.run(run)
            if launcher.stopped_by is not None:
                break
            if run.result() is None:
                failed.append(f"{run.folder.name}: {run.problem()} ({run.log})")
            bar.update()
    return failed, launcher.stopped_by


def evaluation_runs(
    recipe: str, settings: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[SubRun]:
    """A run for every seed and fold, known to be buildable, on data that are there.

    Raises:
        ConfigError: naming the key that is wrong.
    """

    def run(seed: int, fold: int) -> SubRun:
        arguments = ["--recipe", recipe, *settings, "--protocol=fair", "--data.split=test"]
        arguments += [f"--data.fold={fold}", f"--seed={seed}", "--evaluation.save_embeddings=true"]
        return SubRun(arguments, folder / f"seed{seed}-fold{fold}")

    first = run(seeds[0], 0).command.experiment
    folds = range(first.data.folds)
    check(first, [run(seeds[0], fold).command.experiment for fold in folds])
    return [run(seed, fold) for seed in seeds for fold in folds]


# ------------------------------------------------------------------------------------------- summary


Metrics = dict[str, float]


@dataclass(frozen=True)
class Method:
    """What `evaluate` left in a folder.

    Attributes:
        runs: One of them, for what all have in common.
        numbers: {kind: {seed: metrics}}, of the seeds whose folds are all finished.
        dimensions: Of the embeddings, by kind.
        left_out: Why other seeds are not among them.
    """

    folder: Path
    run: Run
    folds: int
    numbers: dict[str, dict[int, Metrics]]
    dimensions: dict[str, int]
    left_out: list[str]


def read_method(folder: Path) -> Method:
    """The results of an evaluation; ensembles are measured where that was not done yet.

    Raises:
        ValueError: if the folder holds none, or runs that do not belong together.
    """
    runs = [load_run(path.parent) for path in sorted(folder.glob("seed*-fold*/run.json"))]
    if not runs:
        raise ValueError(
            f"{folder}: no run there; expected a folder of python -m benchmarks.fair evaluate"
        )
    folds = runs[0].info["config"]["data"]["folds"]
    numbers: dict[str, dict[int, Metrics]] = {kind: {} for kind in KINDS}
    left_out, dimensions = [], {}
    for seed in sorted({run.seed for run in runs}):
        models = [run for run in runs if run.seed == seed]
        finished = [run for run in models if run.info["status"] == "finished"]
        if len(finished) < folds:
            left_out.append(
                f"{folder}: seed {seed} is left out, {len(finished)} of its {folds} folds are finished."
            )
            continue
        for run in models:
            _check_alike(runs[0], run, settings=True)
        together = _ensemble(folder / f"seed{seed}-ensemble.json", models)
        selected = [run.info["selection"] for run in models]
        numbers["validation"][seed] = {
            selected[0]["metric"]: float(np.mean([best["value"] for best in selected]))
        }
        numbers["single"][seed] = {
            key: float(np.mean([run.info["metrics"][key] for run in models]))
            for key in models[0].info["metrics"]
        }
        numbers["ensemble"][seed] = {
            key: together["metrics"][key] for key in models[0].info["metrics"]
        }
        one = together["dimension"] // folds
        dimensions = {"validation": one, "single": one, "ensemble": together["dimension"]}
    if not dimensions:
        raise ValueError(
            f"{folder}: no seed has all its {folds} folds finished; evaluate again goes on with them"
        )
    return Method(folder, runs[0], folds, numbers, dimensions, left_out)


def _check_alike(first: Run, run: Run, *, settings: bool) -> None:
    """Raises unless both were tested on the same images, and if asked, trained by the same settings."""
    for key in TESTED_ON:
        if key != "fold" and run.info["data"].get(key) != first.info["data"].get(key):
            raise ValueError(
                f"{run.folder}: data {key} is {run.info['data'].get(key)!r}, but "
                f"{first.info['data'].get(key)!r} in {first.folder}; only what was tested on the same data can be "
                "compared"
            )
    differing = _differing([first, run])
    if settings and differing:
        raise ValueError(
            f"{run.folder}: its {differing[0]} is not that of {first.folder}; the runs of a method differ in "
            "seed and fold alone"
        )


def _differing(runs: Sequence[Run]) -> list[str]:
    """The settings in which runs differ, beside those that say which run it is."""
    first = runs[0].info["config"]
    changes = [config_changes(first, run.info["config"], ABOUT_THE_RUN) for run in runs[1:]]
    return list(dict.fromkeys(change.key for one in changes for change in one))


def _ensemble(path: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """The metrics of the runs' models together, from the file or into it."""
    of = [run.info["finished"] for run in runs]
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if known["of"] == of:
            return known
    vectors, labels, is_query = concatenated([run.folder / EMBEDDINGS for run in runs])
    settings = runs[0].info["config"]["evaluation"]
    metrics = measure(vectors, labels, recall_at=settings["recall_at"], is_query=is_query)
    if settings["clustering"]:
        metrics |= cluster_metrics(vectors, labels)
    found = {"of": of, "models": len(runs), "dimension": vectors.shape[1], "metrics": metrics}
    write_json(path, found)
    return found


def concatenated(
    paths: Sequence[Path],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The embeddings (n, sum of E) of several models of the same images, their labels and which are queries.

    Raises:
        ValueError: if a file is missing, or is of other images.
    """
    parts, labels, is_query = [], None, None
    for path in paths:
        try:
            with np.load(path) as file:
                arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: cannot be read ({error}); delete the run and evaluate again"
            ) from error
        if labels is not None and not torch.equal(labels, arrays["labels"]):
            raise ValueError(f"{path}: not of the same images as {paths[0]}")
        labels, is_query = arrays["labels"], arrays.get("is_query")
        parts.append(normalize(arrays["embeddings"], dim=1))
    assert labels is not None
    return torch.cat(parts, dim=1), labels, is_query


def comparison(methods: Sequence[Method]) -> str:
    """The methods in markdown: a table for every kind of number, with differences paired by seed.

    Raises:
        ValueError: if they were not tested on the same data, or by the same metrics.
    """
    first = methods[0]
    for method in methods:
        _check_alike(first.run, method.run, settings=False)
        if method.folds != first.folds:
            raise ValueError(
                f"{method.folder}: {method.folds} folds, but {first.folds} in {first.folder}; only models trained "
                "on as many classes can be compared"
            )
        if method.run.info["metrics"].keys() != first.run.info["metrics"].keys():
            raise ValueError(
                f"{method.folder}: measured {sorted(method.run.info['metrics'])}, but {first.folder} "
                f"{sorted(first.run.info['metrics'])}; evaluate both with the same evaluation settings"
            )
    labels = [method.run.label for method in methods]
    names = [
        label if labels.count(label) == 1 else f"{label} ({method.folder})"
        for label, method in zip(labels, methods, strict=True)
    ]
    data = first.run.info["data"]
    parts = [
        f"## {data['name']}, fair protocol: {first.folds} folds of the training classes, tested on "
        f"{data['test_classes']:,} unseen classes ({data['test_images']:,} images)"
    ]
    for kind, title in KINDS.items():
        rows = {name: method.numbers[kind] for name, method in zip(names, methods, strict=True)}
        parts += [f"### {title}", _table(kind, rows, methods).markdown()]
        if differences := paired_differences(rows, names[0]):
            parts += [
                f"Difference to {names[0]}, same seeds, in percentage points:",
                differences.markdown(),
            ]
    return "\n\n".join([*parts, *_notes(methods)]) + "\n"


def _table(kind: str, rows: dict[str, dict[int, Metrics]], methods: Sequence[Method]) -> Table:
    [keys, *_] = [list(metrics) for seeds in rows.values() for metrics in seeds.values()]
    where = "validation" if kind == "validation" else "test"
    return Table(
        ["method", *(f"{where} {metric_name(key)} (%)" for key in keys)]
        + ["models", "dimensions", "seeds"],
        [
            [name, *(estimate([m[key] for m in seeds.values()]).percent() for key in keys)]
            + [MODELS[kind].format(method.folds), str(method.dimensions[kind]), str(len(seeds))]
            for (name, seeds), method in zip(rows.items(), methods, strict=True)
        ],
    )


def _notes(methods: Sequence[Method]) -> list[str]:
    notes = ["± is the half-width of the 95 % Student-t interval over seeds."]
    counts = [len(method.numbers["single"]) for method in methods]
    if min(counts) < SEEDS:
        fewer = min(counts)
        seeds = "1 seed, which has no interval" if fewer == 1 else f"{fewer} seeds"
        notes.append(f"Only {seeds}: fewer than the protocol's {SEEDS}.")
    notes += [line for method in methods for line in method.left_out]
    if differing := _differing([method.run for method in methods]):
        notes.append(f"Settings in which the methods differ: {', '.join(differing)}.")
    return notes


if __name__ == "__main__":
    sys.exit(main())
