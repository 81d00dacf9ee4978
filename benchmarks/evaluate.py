"""Tests the network of a finished run, or of an export, without training: on other images, or by other numbers.

    python -m benchmarks.evaluate RUN --evaluation.recall_at '[1, 10]'
    python -m benchmarks.evaluate RUN --data.dataset folder --data.root DIR
    python -m benchmarks.evaluate RUN --data.dataset table --data.table FILE.csv --data.root DIR

The settings are the run's, except those that are given; benchmarks/run.py --help describes them. Of images that are
not the run's, all classes are tested, unless the dataset, a table's column split, or a setting says which. The
result is written into a file of its own; what the run has recorded stays. Exit status: 2 if nothing was tested.
"""

import shlex
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

# Packages import late: `--help` and a misspelt setting need no torch.
from benchmarks.console.arguments import command_parser, say
from benchmarks.console.failures import machine_failure
from benchmarks.console.printing import PrintableError
from benchmarks.console.stopping import leave, signals_handled, workers_dismissed
from benchmarks.records.files import file_digest, write_json
from benchmarks.records.results import NonFiniteError, Run
from benchmarks.settings.command import Command, parse
from benchmarks.settings.data import num_workers
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment
from benchmarks.settings.trusted import TRUST, trust

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from benchmarks.datasets.glyphs import Glyphs
    from benchmarks.datasets.images import ImageSet

IMAGES = {"data.dataset", "data.root", "data.table"}
CHOICE = {
    **{"data.split": "test", "data.fold": "0", "data.folds": "4", "data.stage": "null"},
    **{"data.test_classes": "null", "data.class_level": "null", "data.known_classes": "null"},
    "data.max_classes": "null",
}
"""Settings that say which classes are tested, and those of other images, for which the run's do not hold."""

GROUPS = {"data.camera": "null", "data.sequence": "null"}
"""Settings that say which images leave rankings, and those of other images."""

SETTINGS = (
    *("data.dataset", "data.root", "data.table", *CHOICE, *GROUPS, "data.image_size"),
    "data.resize",
    *("data.keep_aspect", "data.interpolation", "data.num_workers", "evaluation.recall_at"),
    *("evaluation.batch_size", "evaluation.parts", "evaluation.clustering"),
    *("evaluation.verification", "precision"),
)

TRAINING = {
    **{"protocol": "paper", "model.weights": "null", "data.decoded_gib": "null"},
    "data.download": "null",
    **{"data.cached_views": "null", "data.train_classes": "null", "data.draw_classes": "null"},
    **{"evaluation.every": "0", "evaluation.oracle": "false", "evaluation.descriptor": "false"},
    **{"evaluation.orders": "false", "evaluation.features": "null"},
    "evaluation.divergence": "false",
}
"""Settings of the training and of what needs its images or losses, with the value that leaves them out."""


@signals_handled(leave)
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser("evaluate", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of an export")
    where = "the result; default: evaluation.json in RUN, RUN-evaluation.json beside an export, then numbered"
    parser.add_argument("--output", type=Path, metavar="FILE.json", help=where)
    parser.add_argument("--trust", action="append", default=[], metavar="MODULE", help=TRUST)
    group = parser.add_argument_group("settings", "as benchmarks/run.py --help describes them")
    for name in SETTINGS:
        group.add_argument(f"--{name}", dest=name, metavar="VALUE", default=SUPPRESS)
    options, others = parser.parse_known_args(argv)
    if others:
        parser.error(f"{others[0]}: is no setting of a test; --help lists them")
    try:
        with workers_dismissed():
            return _run(options, argv)
    except Exception as error:
        expected = isinstance(error, (PrintableError, OSError, NonFiniteError))
        line = str(error) if expected else machine_failure(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2


@dataclass(frozen=True)
class Test:
    """A network, and what it is tested on."""

    network: "nn.Module"
    trunk: "nn.Module"
    about: dict[str, Any]  # facts about its training, for the record
    experiment: Experiment  # the run's, with the settings that were given
    config: dict[str, Any]  # its settings, for the record
    images: "Glyphs | ImageSet"  # without views
    are_known: bool  # if the run's record says whether it was trained on these classes

    @property
    def title(self) -> str:
        from benchmarks.datasets.queries import count_queries, leaving_text, queries_text

        data = self.experiment.data
        classes = f"{'unseen ' * (not data.known_classes)}{data.split} classes"
        if not self.are_known:
            classes = "other images"
        elif data.split == "all":
            classes = "the classes of the training"
        counts = f"{self.images.num_classes:,} classes, {len(self.images):,} images"
        asked = count_queries(self.images.labels, self.images.ranking)
        counts += f", {queries_text(*asked)}"
        if leaving := leaving_text(data.camera, data.sequence):
            counts += f"; {leaving}"
        return f"{data.dataset}: {classes} ({counts}), tested with {self.about['network']}"


UNKNOWN = "The network may have been trained on some of these classes."


def _run(options: Namespace, argv: Sequence[str]) -> int:
    """Test, print and write; the exit status."""
    from benchmarks.records.provenance import (
        describe_code,
        describe_hardware,
        describe_versions,
        now,
    )
    from benchmarks.reporting.comparison import compare
    from benchmarks.training.launcher import start
    from benchmarks.training.parts import check_parts

    trust(options.trust)
    is_run, folder = (options.run / "run.json").exists(), options.run.absolute()
    # An export may be published, and this file holds paths.
    beside = folder.with_name(f"{folder.name}-evaluation.json")
    output: Path = options.output or _free(options.run / "evaluation.json" if is_run else beside)
    if output.exists():
        raise ConfigError(f"--output: {output} exists; choose another file")
    try:
        with TemporaryFile(dir=next(path for path in output.absolute().parents if path.exists())):
            pass  # a file can be written there
    except OSError as error:
        raise ConfigError(f"--output: {output}: {error.strerror}") from error
    given = {name: value for name in SETTINGS if (value := vars(options).get(name)) is not None}
    test = (_of_run if is_run else _of_export)(options.run, given)
    check_parts(test.experiment.evaluation, test.images)
    accelerator = start(test.experiment)
    try:
        info = _tested(test, accelerator)
        if accelerator.is_main_process:
            run = Run(options.run, {**info, "steps": info["steps"] or 0})  # unknown ones
            command = shlex.join(["python", "-m", "benchmarks.evaluate", *argv])
            session = {"command": command, **describe_code(), "finished": now()}
            session |= {"versions": describe_versions()}
            session |= {"hardware": describe_hardware()}
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, session | info)
            page = compare([run])
            blocks = [*page.blocks, *([] if test.are_known else [UNKNOWN])]
            say(replace(page, title=test.title, blocks=blocks).terminal())
            say(f"Result: {output}")
    finally:
        accelerator.end_training()
    return 0


def _free(path: Path) -> Path:
    """The path, or NAME-2.json and so on: a result is never overwritten."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(other for other in chain([path], others) if not other.exists())


Loaded = tuple[Command, "Glyphs | ImageSet"]


def _of_run(folder: Path, given: Mapping[str, str]) -> Test:
    """The network of a run, on its own images or on others."""
    from benchmarks.building.images import build_tested
    from benchmarks.evaluation.networks import load_network

    restored = load_network(folder)
    info, config = restored.run.info, restored.run.file("config.yaml")
    own = restored.experiment.data

    def load(
        values: Mapping[str, str], default: float | None, given: Mapping[str, str] = given
    ) -> Loaded:
        command = _parse(config, {**TRAINING, **values, **given}, own.in_chans)
        experiment = command.experiment
        return command, build_tested(experiment.data, seed=experiment.seed, default=default)

    loaded, same, named = None, False, given.keys() & IMAGES
    if given.get("data.dataset", own.dataset) == own.dataset:
        try:
            loaded = load({}, 0.5)
            as_run = {name: value for name, value in given.items() if name not in GROUPS}
            alike = loaded if len(as_run) == len(given) else load({}, 0.5, as_run)
            same = alike[1].fingerprint == info["data"]["fingerprint"]
        except ConfigError:
            if not named:
                raise
    if loaded is None or (named and not same):
        loaded = load({"data.table": "null", **CHOICE, **GROUPS}, None)
    command, images = loaded
    about = {"network": f"{folder}", "step": restored.step, "weights": info.get("weights")}
    about |= {name: info[name] for name in ("label", "seed", "protocol", "steps")}
    settings = command.resolved().config
    are_known = same and not given.keys() & CHOICE.keys()
    network = restored.network
    return Test(network, network.trunk, about, command.experiment, settings, images, are_known)


def _of_export(folder: Path, given: Mapping[str, str]) -> Test:
    """The network of an export, which has no images of its own."""
    from benchmarks.building.images import build_tested
    from benchmarks.evaluation.networks import load_export

    if not (folder / "model.safetensors").exists():
        raise ConfigError(
            f"{folder}: holds neither run.json nor model.safetensors; expected the folder of a run, or of an export"
        )
    network, view = load_export(folder)
    if not given.keys() & IMAGES:
        raise ConfigError(
            "data.root: an export has no images; name some, as in --data.dataset folder --data.root DIR"
        )
    view = {f"data.{name}": f"{value}".lower() for name, value in view.items()}
    recall = {"evaluation.recall_at": "[1, 2, 4, 8]"}
    channels = network.pretrained_cfg["input_size"][0]
    command = _parse(None, {**TRAINING, **recall, **CHOICE, **view, **given}, channels)
    images = build_tested(command.experiment.data)
    digest = {"sha256": file_digest(folder / "model.safetensors")}
    about: dict[str, Any] = {"network": f"{folder}", "label": folder.resolve().name}
    about |= {"weights": digest, "seed": 0, "protocol": None, "steps": None}
    config = {name: command.config[name] for name in ("precision", "data", "evaluation")}
    return Test(network, network, about, command.experiment, config, images, False)


def _parse(config: Path | None, values: Mapping[str, str], channels: int) -> Command:
    """Settings for a network that sees images of so many channels."""
    words = [f"--{name}={value}" for name, value in values.items()]
    command = parse([*([] if config is None else [f"--config={config}"]), *words])
    data = command.experiment.data
    if data.in_chans != channels:
        raise ConfigError(
            f"data.dataset: the network sees images of {channels} channels, and those of {data.dataset} have "
            f"{data.in_chans}; test it on others"
        )
    return command


def _tested(test: Test, accelerator: "Accelerator") -> dict[str, Any]:
    """The record of the test, complete on the main process; all processes call this."""
    from benchmarks.building.images import Datasets, show_to
    from benchmarks.evaluation.outputs import test_outputs, verified
    from benchmarks.evaluation.tester import Evaluator, per_class
    from benchmarks.records.provenance import describe_tested, look_through

    data, tests, images = test.experiment.data, test.experiment.evaluation, test.images
    show_to(test.trunk, Datasets(images, images), data)
    about = describe_tested(data, images, test.trunk)
    if accelerator.is_main_process:
        about |= look_through(data, images)
    exact = test.experiment.precision == "float64"
    network = test.network.double() if exact else test.network.float()
    network = accelerator.prepare_model(network, evaluation_mode=True)
    workers = num_workers(data, accelerator.num_processes)
    evaluator = Evaluator(accelerator, network, tests.batch_size, workers)
    found, outputs, half_widths, _ = test_outputs(evaluator, None, None, images, tests)
    return {
        **test.about,
        **{"status": "finished", "config": test.config, "data": about},
        **{"metrics": found.metrics, "outputs": outputs, "half_widths": half_widths},
        "per_class": per_class(found.ranks, images.num_classes),
        **verified(found, test.experiment, accelerator),
    }


if __name__ == "__main__":
    sys.exit(main())
