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
from benchmarks.console.arguments import command_parser, refusing, say, user_path
from benchmarks.console.failures import machine_failure
from benchmarks.console.stopping import workers_dismissed
from benchmarks.records.files import file_digest, write_json
from benchmarks.records.results import Run
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

CLASSES = ("stage", "test_classes", "class_level", "known_classes", "max_classes")
CHOICE = {"data.split": "test", "data.fold": "0", "data.folds": "4"}
CHOICE |= {f"data.{name}": "null" for name in CLASSES}
"""Settings that say which classes are tested, and those of other images, for which the run's do not hold."""

GROUPS = {"data.camera": "null", "data.sequence": "null"}
"""Settings that say which images leave rankings, and those of other images."""

SETTINGS = (
    *("data.dataset", "data.root", "data.table", *CHOICE, *GROUPS, "data.image_size"),
    *("data.resize", "data.keep_aspect", "data.interpolation", "data.num_workers", "precision"),
    *("evaluation.recall_at", "evaluation.batch_size", "evaluation.parts"),
    *("evaluation.clustering", "evaluation.verification"),
)

TRAINING = {"protocol": "paper", "model.weights": "null", "evaluation.every": "0"}
TRAINING |= {"evaluation.features": "null"}
TRAINING |= {f"evaluation.{x}": "false" for x in ("oracle", "descriptor", "orders", "divergence")}
UNUSED = ("decoded_gib", "download", "cached_views", "train_classes", "draw_classes")
TRAINING |= {f"data.{name}": "null" for name in UNUSED}
"""Settings of the training and of what needs its images or losses, with the value that leaves them out."""


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser("evaluate", __doc__)
    parser.add_argument(
        "run", type=user_path, metavar="RUN", help="folder of a run, or of an export"
    )
    where = "the result; default: evaluation.json in RUN, RUN-evaluation.json beside an export, then numbered"
    parser.add_argument("--output", type=user_path, metavar="FILE.json", help=where)
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
    except (MemoryError, RuntimeError) as error:
        if (line := machine_failure(error)) is None:
            raise
        raise ConfigError(line) from error


@dataclass(frozen=True)
class Test:
    """A network, and what it is tested on."""

    network: "nn.Module"
    about: dict[str, Any]  # facts about it and its training, and its settings, for the record
    experiment: Experiment  # the run's, with the settings that were given
    images: "Glyphs | ImageSet"  # without views
    are_known: bool  # if the run's record says whether it was trained on these classes

    @property
    def classes(self) -> str:
        data = self.experiment.data
        if not self.are_known:
            return "other images"
        if data.split == "all":
            return "the classes of the training"
        return f"{'unseen ' * (not data.known_classes)}{data.split} classes"


def _run(options: Namespace, argv: Sequence[str]) -> int:
    """Test, print and write; the exit status."""
    from benchmarks.records.provenance import describe_machine, now
    from benchmarks.reporting.comparison import compare, tested_text
    from benchmarks.training.launcher import start
    from benchmarks.training.parts import check_parts

    trust(options.trust)
    output, given = _output(options), {k: v for k, v in vars(options).items() if k in SETTINGS}
    test = (_of_run if _is_run(options.run) else _of_export)(options.run, given)
    check_parts(test.experiment.evaluation, test.images)
    accelerator = start(test.experiment)
    try:
        info = _tested(test, accelerator)
        if accelerator.is_main_process:
            command = shlex.join(["python", "-m", "benchmarks.evaluate", *argv])
            session = {"command": command, **describe_machine(), "finished": now()}
            output = _output(options)  # another command may have written the first one meanwhile
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, session | info)
            page, data = compare([Run(options.run, info)]), info["data"]
            if not test.are_known:
                page.blocks.append("The network may have been trained on some of these classes.")
            about = f"{test.classes} ({tested_text(data)}), tested with {info['network']}"
            say(replace(page, title=f"{data['name']}: {about}").terminal())
            say(f"Result: {output}")
    finally:
        accelerator.end_training()
    return 0


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").exists()


def _output(options: Namespace) -> Path:
    """The file of the result, which can be written and is not there: a result is never overwritten."""
    path, folder = options.run / "evaluation.json", options.run.absolute()
    if not _is_run(folder):  # an export may be published, and this file holds paths
        path = folder.with_name(f"{folder.name}-evaluation.json")
    paths = chain([path], (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    output: Path = options.output or next(path for path in paths if not path.exists())
    if output.exists():
        raise ConfigError(f"--output: {output} exists; choose another file")
    try:
        with TemporaryFile(dir=next(path for path in output.absolute().parents if path.exists())):
            return output
    except OSError as error:
        raise ConfigError(f"--output: {output}: {error.strerror}") from error


def _of_run(folder: Path, given: Mapping[str, str]) -> Test:
    """The network of a run, on its own images or on others."""
    from benchmarks.building.images import build_tested
    from benchmarks.evaluation.networks import load_network

    restored = load_network(folder)
    info, config = restored.run.info, restored.run.file("config.yaml")
    channels = restored.experiment.data.in_chans

    def load(values: Mapping[str, str], default: float | None) -> Any:
        command = _parse(config, {**TRAINING, **values}, channels)
        data, seed = command.experiment.data, command.experiment.seed
        return command, build_tested(data, seed=seed, default=default)

    same, named = False, given.keys() & IMAGES
    try:
        alike = {name: value for name, value in given.items() if name not in GROUPS}
        command, images = load(alike, 0.5)
        same = images.fingerprint == info["data"]["fingerprint"]
        if alike != given:
            command, images = load(given, 0.5)
    except ConfigError:
        if not named:
            raise
        same = False
    if named and not same:
        command, images = load({"data.table": "null", **CHOICE, **GROUPS, **given}, None)
    about = {"network": f"{folder}", "step": restored.step, "weights": info.get("weights")}
    about |= {name: info[name] for name in ("label", "seed", "protocol", "steps")}
    about["config"] = command.resolved().config
    are_known = same and not given.keys() & CHOICE.keys()
    return Test(restored.network, about, command.experiment, images, are_known)


def _of_export(folder: Path, given: Mapping[str, str]) -> Test:
    """The network of an export, which has no images of its own."""
    from benchmarks.building.images import build_tested
    from benchmarks.evaluation.networks import load_export

    if not (weights := folder / "model.safetensors").exists():
        raise ConfigError(
            f"{folder}: holds neither run.json nor model.safetensors; expected the folder of a run, or of an export"
        )
    network, view = load_export(folder)
    if not given.keys() & IMAGES:
        raise ConfigError(
            "data.root: an export has no images; name some, as in --data.dataset folder --data.root DIR"
        )
    values = {f"data.{name}": f"{value}".lower() for name, value in view.items()}
    values |= {"evaluation.recall_at": "[1, 2, 4, 8]", **TRAINING, **CHOICE, **given}
    command = _parse(None, values, network.pretrained_cfg["input_size"][0])
    about: dict[str, Any] = {"network": f"{folder}", "label": folder.resolve().name}
    about |= {"weights": {"sha256": file_digest(weights)}, "seed": 0, "protocol": None}
    config = {name: command.config[name] for name in ("precision", "data", "evaluation")}
    about |= {"steps": None, "config": config}
    images = build_tested(command.experiment.data)
    return Test(network, about, command.experiment, images, False)


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
    from benchmarks.evaluation.tester import Evaluator
    from benchmarks.records.provenance import describe_tested, look_through

    data, tests, images = test.experiment.data, test.experiment.evaluation, test.images
    trunk = getattr(test.network, "trunk", test.network)
    show_to(trunk, Datasets(images, images), data)
    about = describe_tested(data, images, trunk)
    if accelerator.is_main_process:
        about |= look_through(data, images)
    exact = test.experiment.precision == "float64"
    network = test.network.double() if exact else test.network.float()
    network = accelerator.prepare_model(network, evaluation_mode=True)
    workers = num_workers(data, accelerator.num_processes)
    evaluator = Evaluator(accelerator, network, tests.batch_size, workers)
    found, entries = test_outputs(evaluator, None, None, images, tests)
    entries |= verified(found, test.experiment, accelerator)
    return {**test.about, "status": "finished", "data": about, **entries}


if __name__ == "__main__":
    sys.exit(main())
