"""One run from its folder to its report."""

import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.building.images import Datasets
from benchmarks.console.arguments import say
from benchmarks.console.printing import reason
from benchmarks.console.stopping import handle_signals
from benchmarks.evaluation.closed_form import save_head, set_head
from benchmarks.evaluation.curves import SELECTED_BY, Curves
from benchmarks.evaluation.outputs import (
    best_by_the_test,
    save_embeddings,
    test_outputs,
    test_untrained,
    verified,
)
from benchmarks.evaluation.showcase import save_neighbours, save_showcase
from benchmarks.evaluation.tester import Evaluator, per_class
from benchmarks.records.provenance import describe_data, look_through, now, peak_memory
from benchmarks.records.results import NonFiniteError, digests, load_run
from benchmarks.records.run_folder import RunFolderError, load_best, load_checkpoint
from benchmarks.records.run_writer import RunWriter
from benchmarks.records.steps import Row, read_table
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.figures import write_html
from benchmarks.settings.command import Command
from benchmarks.settings.data import num_workers
from benchmarks.training.batches import training_loader
from benchmarks.training.cached_views import CachedViews
from benchmarks.training.loop import StepError, Trainer
from benchmarks.training.parts import build_parts, decoded, find_horde
from benchmarks.training.state import TrainingState

if TYPE_CHECKING:
    from accelerate import Accelerator


def stop(number: int, frame: object = None) -> None:
    handle_signals(signal.SIG_IGN)  # the run is saving now
    raise KeyboardInterrupt(number)


class OngoingRun:
    """A run being made: data, network, loss and the folder of its results.

    Raises:
        ConfigError: if the data cannot be read, or something does not suit the experiment.
        InUseError: if another process writes the folder.
        RunFolderError: if the folder holds another run, or a checkpoint that is damaged or of another run.
    """

    def __init__(self, command: Command, argv: Sequence[str], accelerator: "Accelerator") -> None:
        self.experiment = experiment = command.experiment
        self.accelerator = accelerator
        model, self.datasets, loss, self.sampler = build_parts(experiment, accelerator)
        about = describe_data(experiment, self.datasets, model.trunk)
        self.state = TrainingState(accelerator, experiment, model, loss)
        model, tests, data = self.state.model, experiment.evaluation, experiment.data
        self.images = self.datasets
        self.num_workers = num_workers(data, accelerator.num_processes)
        self.caches: list[Any] = []  # what takes the place of `datasets`, or None where it has none
        if data.cached_views is not None:
            self.num_workers = 0  # nothing is left to do for an image whose output is kept
            keep = partial(CachedViews, accelerator, model, experiment=experiment)
            train, *tested = self.datasets
            untrained = not self.sampler.steps
            kept = keep(train, test=untrained)
            self.caches = [kept, *(of and keep(of, test=True) for of in tested)]
        elif data.decoded_gib is not None:
            self.caches = decoded(self.datasets, data, accelerator.device)
        self.evaluator = Evaluator(accelerator, model, tests.batch_size, self.num_workers)
        self.curves = Curves(self.evaluator, self.images, tests)

        look = partial(look_through, data, self.datasets.test)
        self.record = RunWriter(command, argv, accelerator, about, look)
        if not self.record.finished:
            try:
                self._restore()
            except BaseException:
                self.record.close()
                raise

    def _restore(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        path = self.record.path
        saved = load_checkpoint(path, self.record.identity)
        if saved is not None:
            try:
                self.state.load_state_dict(saved)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise RunFolderError(
                    f"{path / 'checkpoints'}: the checkpoint does not fit the network, loss and optimizer of these "
                    f"versions ({reason(error)}); continue with those that run.json names"
                ) from error
            self.curves.best = saved["best"]
        self.record.begin(saved)

    def execute(self) -> None:
        """Train, test and report."""
        state = self.state
        if self.record.finished:
            if self.accelerator.is_main_process:
                print(f"{self.record.path} is finished (delete it to run it again); its results:\n")
                self._report()
            return
        if self.caches:  # decoded images, or kept outputs, which are computed unless they are there
            self.images = Datasets(*(of and of.open() for of in self.caches))
            self.curves.datasets = self.images
        if state.step == 0:
            self.start()
        if state.step < self.sampler.steps:
            self.train()
        elif state.step == 0:
            self._save()
        if state.stopped_by is not None:
            self.record.update(wall_time_s=state.seconds)
            stop(state.stopped_by)
        self.test()

    def start(self) -> None:
        """Set the head's layer, if it starts from the features, and test the network before its training.

        Under protocol "fair", only the untrained trunk is tested now, which chooses nothing.
        """
        experiment, (train, test, _) = self.experiment, self.images
        size = experiment.model.embedding_size
        if (head := experiment.model.head) in ("pca", "whitened"):
            set_head(self.evaluator, train, size, whiten=head == "whitened")
        if experiment.data.split != "test":
            return
        metrics, outputs, by_class = test_untrained(
            self.evaluator, train, test, experiment.evaluation, size
        )
        before = None if experiment.protocol == "fair" else metrics
        self.record.update(before_training=before, outputs=outputs, per_class_of_outputs=by_class)

    def train(self) -> None:
        """Train to the last step, or until asked to stop."""
        self.sampler.step = self.state.step
        loader = training_loader(
            self.accelerator, self.images.train, self.sampler, self.num_workers
        )
        trainer = Trainer(
            *(self.state, self.sampler, self.experiment),
            log=self.record.log,
            evaluate=self._evaluate,
            save=self._save,
        )
        trainer.run(loader)

    def _save(self) -> None:
        self.record.save(self.state.step, self.state.state_dict() | {"best": self.curves.best})

    def _evaluate(self) -> None:
        """Measure a point of the curves, and keep the weights if they are the best."""
        before, step = self.curves.best, self.state.step
        rows: dict[str, list[Row]] = {"evaluation": [(step, self.curves.point(step))]}
        if self.curves.best != before:
            self.record.save_best(step, self.state.weights())
        if self.experiment.evaluation.oracle and step:
            rows["oracle"] = [(step, self.curves.oracle())]
        self.record.log(rows)

    def test(self) -> None:
        """Test the trained network, or the one that validation classes chose."""
        begun, path, state = time.perf_counter(), self.record.path, self.state
        best, tests, (train, test, _) = self.curves.best, self.experiment.evaluation, self.images
        if best is not None:
            state.load_weights(load_best(path, best["step"], self.record.identity))
        layer = None
        if self.experiment.model.head == "none":
            size = self.experiment.model.embedding_size
            layer = set_head(self.evaluator, train, size)
        found, outputs, half_widths, by_class = test_outputs(
            self.evaluator, find_horde(state.loss), train, test, tests
        )
        verification = {}
        if self.experiment.data.split == "test":
            verification = verified(found, test, self.experiment, self.accelerator)
        if not self.accelerator.is_main_process:
            return
        losses = read_table(path / "records", "training").get("loss", [])
        start = self.record.info
        if layer is not None:
            save_head(path, layer)
        if self.experiment.report == "neighbours":
            save_neighbours(path, self.datasets.test, found)
        elif self.experiment.report:
            save_showcase(path, self.datasets.test, found)
        if tests.save_embeddings:
            save_embeddings(path, self.datasets.test, found.embeddings)
        self.record.finish(
            state.step,
            found.metrics,
            finished=now(),
            outputs=outputs | start.get("outputs", {}),
            never_acted=bool(losses) and not any(losses),
            per_class=per_class(found.ranks, test.num_classes),
            per_class_of_outputs=by_class | start.get("per_class_of_outputs", {}),
            half_widths=half_widths,
            **verification,
            selection=best and {"metric": SELECTED_BY, **best},
            oracle=best_by_the_test(path, tests.recall_at),
            peak_memory_gib=peak_memory(),
            files=digests(path),
            wall_time_s=state.seconds + time.perf_counter() - begun,
            images_per_second=state.busy_seconds
            and state.step * self.sampler.batch_size / state.busy_seconds,
        )
        self._report()

    def _report(self) -> None:
        runs = [load_run(self.record.path)]
        say(compare(runs).terminal())
        if self.experiment.report is True:
            page = self.record.path / "report.html"
            write_html(runs, page)
            say(f"\nreport: {page}")

    def note_failure(self, error: BaseException, line: str | None) -> None:
        """Write into run.json why the run failed."""
        cause = error.__cause__ if isinstance(error, StepError) else None
        with suppress(OSError):
            self.record.update(
                status="failed",
                error=line or f"{type(error).__name__}: {reason(error)}",
                diverged=isinstance(error, NonFiniteError),
                traceback=cause and "".join(traceback.format_exception(cause)),
            )
