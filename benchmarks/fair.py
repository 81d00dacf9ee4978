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

search and evaluate train several models at once with --jobs, and with --ray [ADDRESS] on all devices of this
machine or on a cluster: docs/cluster.md.

Exit status: 2 for what cannot be started, 1 if a run failed, 128 + signal if it was stopped; the same command
goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.console.arguments import (
    at_least,
    command_parser,
    refusing,
    split_settings,
    user_folder,
    user_path,
)
from benchmarks.console.writing import OwnedFolder, replace_file
from benchmarks.settings.errors import ConfigError

# Light: torch is imported by what a command calls.
from benchmarks.studies.jobs import check_settings, make_job, read, trying_out
from benchmarks.studies.launching import add_arguments, make_launcher

SEEDS = 5  # of the protocol

OURS = ("--config", "--protocol", "--data.split", "--data.fold", "--evaluation.save_embeddings")


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    argv, settings = split_settings(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(argv)

    from benchmarks.reporting.folds import fair_comparison, read_method

    if options.run is None:  # compare
        if settings:
            raise ConfigError(f"{settings[0]}: compare trains nothing and takes no settings")
        methods = [read_method(folder) for folder in options.folders]
        print(fair_comparison(methods, SEEDS))
        return 0
    check_settings(settings, OURS)
    settings = [*(f"--config={path}" for path in options.config), *settings]
    folder = options.runs or Path("runs", options.kind, options.recipe.replace("/", "-"))
    return int(options.run(options, settings, folder))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("fair", __doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add = partial(commands.add_parser, allow_abbrev=False)
    search = add("search", help="find settings on validation classes")
    evaluate = add("evaluate", help="train and test all seeds and folds")
    compare = add("compare", help="evaluated methods side by side, and paired by seed")
    for command, run, kind in ((search, _search, "search"), (evaluate, _evaluate, "fair")):
        command.set_defaults(run=run, kind=kind)
        command.add_argument("recipe", metavar="RECIPE", help="PAPER/TABLE/ROW")
        files = "a YAML file of settings; repeatable"
        command.add_argument("--config", type=user_path, action="append", default=[], help=files)
        command.add_argument("--runs", type=user_folder, help=f"default: runs/{kind}/RECIPE")

    ranges = "YAML: {setting: {low, high, log, int} or {choices}}"
    search.add_argument("--space", type=user_path, required=True, help=ranges)
    budget = "fixed once begun; default %(default)s"
    search.add_argument("--trials", type=at_least(1), default=50, help=budget)
    seed = "of the sampler and the trainings; default %(default)s"
    search.add_argument("--seed", type=at_least(0), default=0, help=seed)
    add_arguments(
        search, "so many trials at once; default: 1, so that each knows all earlier results"
    )

    seeds = "0 to N - 1; default %(default)s"
    evaluate.add_argument("--seeds", type=at_least(1), default=SEEDS, help=seeds)
    add_arguments(evaluate, "so many runs at once; default: 1, with --ray as many as fit")
    evaluate.add_argument("--redo-stale", action="store_true", help="move stale runs aside")
    compare.add_argument("folders", nargs="+", type=user_path, metavar="FOLDER")
    compare.set_defaults(run=None)
    return parser


def _search(options: argparse.Namespace, settings: Sequence[str], folder: Path) -> int:
    from benchmarks.studies.search import Search, read_space

    if find_spec("optuna") is None:
        raise ConfigError("search: Optuna is not installed; pip install '.[benchmarks,search]'")
    space = read_space(options.space)
    search = Search(options.recipe, settings, space, options.trials, options.seed, folder)
    options.jobs = options.jobs or 1  # with Ray, too
    launcher = make_launcher(options, folder)
    search.check()
    with OwnedFolder(folder):
        return search.execute(launcher)


def _evaluate(options: argparse.Namespace, settings: Sequence[str], folder: Path) -> int:
    from benchmarks.reporting.folds import fair_comparison, read_method
    from benchmarks.studies.queue import Queue

    mine = ["--protocol=fair", "--data.split=test", "--evaluation.save_embeddings=true"]
    command = read(["--recipe", options.recipe, *settings, *mine])
    runs = [
        make_job(command, folder / f"seed{seed}-fold{fold}", {"seed": seed, "data.fold": fold})
        for seed in range(options.seeds)
        for fold in range(command.experiment.data.folds)
    ]
    list(trying_out(runs))
    launcher = make_launcher(options, folder)
    with OwnedFolder(folder):
        if stopped := Queue(lambda: runs, len(runs), launcher, redo_stale=options.redo_stale).run():
            return stopped
        failed = [run for run in runs if run.why is not None]
        if len(failed) < len(runs):
            text = fair_comparison([read_method(folder)], SEEDS)
            replace_file(folder / "summary.md", text.encode())
            print(text)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
