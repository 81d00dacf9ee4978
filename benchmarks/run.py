"""Train, test and report one experiment.

    accelerate launch benchmarks/run.py [--recipe PAPER/TABLE/ROW] [--config FILE.yaml] [--any.setting value]

Without a recipe it runs the embedded default: binomial deviance on Glyphs. `--list` shows the recipes, `--help`
the settings, `--print_config` the resolved run; `--resume` continues from the last checkpoint. Exit status: 1 if
the run failed (run.json says why), 2 if it cannot start, 3 if another process is writing it, 128 + signal if it
was stopped and has saved.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started as a file
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler prints a traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Packages import late: `--help` and a misspelt setting need no torch.
from benchmarks import (
    building,
    console,
    evaluation,
    records,
    reporting,
    settings,
    training,
)

if TYPE_CHECKING:
    from accelerate import Accelerator


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    with console.signals_handled(console.leave), console.workers_dismissed():
        try:
            if "--list" in argv:
                console.say(reporting.recipe_table())
                return 0
            command = settings.parse(argv)
            command = replace(command, config=building.resolved(command.config))
            if "--print_config" in argv:
                console.say(settings.dump(command.config), end="")
                return 0
            return _run(command, argv)
        except console.PrintableError as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr)
            return 3 if isinstance(error, console.InUseError) else 2
        except KeyboardInterrupt as stop:
            return 128 + int(stop.args[0])


def _run(command: settings.Command, argv: Sequence[str]) -> int:
    accelerator = training.start(command.experiment)
    run: OngoingRun | None = None
    try:
        run = OngoingRun(command, argv, accelerator)
        console.handle_signals(_stop)  # during the training: StopRequest's
        run.execute()
        return 0
    except (settings.ConfigError, records.RunFolderError, console.InUseError):
        raise
    except KeyboardInterrupt:
        assert run is not None  # until then, a signal ends the process
        run.record.update(status="stopped")
        accelerator.print("\nstopped; rerun the same command with --resume to continue")
        raise
    except BaseException as error:
        line = training.expected_failure(error, command.experiment)
        if run is not None:
            run.note_failure(error, line)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 1
    finally:
        console.handle_signals(console.leave)
        if run is not None:
            run.record.close()
        accelerator.end_training()


def _stop(number: int, frame: object = None) -> None:
    console.handle_signals(signal.SIG_IGN)  # the run is saving now
    raise KeyboardInterrupt(number)


class OngoingRun:
    """A run being made: data, network, loss and the folder of its results.

    Raises:
        ConfigError: if the data cannot be read, or something does not suit the experiment.
        InUseError: if another process writes the folder.
        RunFolderError: if the folder holds another run, or a checkpoint that is damaged or of another run.
    """

    def __init__(
        self, command: settings.Command, argv: Sequence[str], accelerator: "Accelerator"
    ) -> None:
        self.experiment = experiment = command.experiment
        self.accelerator = accelerator
        model, self.datasets, loss, self.sampler = training.build_parts(experiment, accelerator)
        about = records.describe_data(experiment, self.datasets, model.trunk)
        self.state = training.TrainingState(accelerator, experiment, model, loss)
        model, tests, data = self.state.model, experiment.evaluation, experiment.data
        self.images = self.datasets
        self.num_workers = settings.num_workers(data, accelerator.num_processes)
        self.caches: list[Any] = []  # what takes the place of `datasets`, or None where it has none
        if data.cached_views is not None:
            self.num_workers = 0  # nothing is left to do for an image whose output is kept
            keep = partial(training.CachedViews, accelerator, model, experiment=experiment)
            train, *tested = self.datasets
            untrained = not self.sampler.steps
            kept = keep(train, test=untrained)
            self.caches = [kept, *(of and keep(of, test=True) for of in tested)]
        elif data.decoded_gib is not None:
            self.caches = training.decoded(self.datasets, data, accelerator.device)
        self.evaluator = evaluation.Evaluator(
            accelerator, model, tests.batch_size, self.num_workers
        )
        self.curves = evaluation.Curves(self.evaluator, self.images, tests)

        look = partial(records.look_through, data, self.datasets.test)
        self.record = records.RunWriter(command, argv, accelerator, about, look)
        if not self.record.finished:
            try:
                self._restore()
            except BaseException:
                self.record.close()
                raise

    def _restore(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        path = self.record.path
        saved = records.load_checkpoint(path, self.record.identity)
        if saved is not None:
            try:
                self.state.load_state_dict(saved)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise records.RunFolderError(
                    f"{path / 'checkpoints'}: the checkpoint does not fit the network, loss and optimizer of these "
                    f"versions ({console.reason(error)}); continue with those that run.json names"
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
            self.images = building.Datasets(*(of and of.open() for of in self.caches))
            self.curves.datasets = self.images
        if state.step == 0:
            self.start()
        if state.step < self.sampler.steps:
            self.train()
        elif state.step == 0:
            self._save()
        if state.stopped_by is not None:
            self.record.update(wall_time_s=state.seconds)
            _stop(state.stopped_by)
        self.test()

    def start(self) -> None:
        """Set the head's layer, if it starts from the features, and test the network before its training.

        Under protocol "fair", only the untrained trunk is tested now, which chooses nothing.
        """
        experiment, (train, test, _) = self.experiment, self.images
        size = experiment.model.embedding_size
        if (head := experiment.model.head) in ("pca", "whitened"):
            evaluation.set_head(self.evaluator, train, size, whiten=head == "whitened")
        if experiment.data.split != "test":
            return
        metrics, outputs, by_class = evaluation.test_untrained(
            self.evaluator, train, test, experiment.evaluation, size
        )
        before = None if experiment.protocol == "fair" else metrics
        self.record.update(before_training=before, outputs=outputs, per_class_of_outputs=by_class)

    def train(self) -> None:
        """Train to the last step, or until asked to stop."""
        self.sampler.step = self.state.step
        loader = training.training_loader(
            self.accelerator, self.images.train, self.sampler, self.num_workers
        )
        trainer = training.Trainer(
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
        rows: dict[str, list[records.Row]] = {"evaluation": [(step, self.curves.point(step))]}
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
            state.load_weights(records.load_best(path, best["step"], self.record.identity))
        layer = None
        if self.experiment.model.head == "none":
            size = self.experiment.model.embedding_size
            layer = evaluation.set_head(self.evaluator, train, size)
        found, outputs, half_widths, by_class = evaluation.test_outputs(
            self.evaluator, training.find_horde(state.loss), train, test, tests
        )
        verification = {}
        if self.experiment.data.split == "test":
            verification = evaluation.verified(found, test, self.experiment, self.accelerator)
        if not self.accelerator.is_main_process:
            return
        losses = records.read_table(path / "records", "training").get("loss", [])
        start = self.record.info
        if layer is not None:
            evaluation.save_head(path, layer)
        if self.experiment.report == "neighbours":
            evaluation.save_neighbours(path, self.datasets.test, found)
        elif self.experiment.report:
            evaluation.save_showcase(path, self.datasets.test, found)
        if tests.save_embeddings:
            evaluation.save_embeddings(path, self.datasets.test, found.embeddings)
        self.record.finish(
            state.step,
            found.metrics,
            finished=records.now(),
            outputs=outputs | start.get("outputs", {}),
            never_acted=bool(losses) and not any(losses),
            per_class=evaluation.per_class(found.ranks, test.num_classes),
            per_class_of_outputs=by_class | start.get("per_class_of_outputs", {}),
            half_widths=half_widths,
            **verification,
            selection=best and {"metric": evaluation.SELECTED_BY, **best},
            oracle=evaluation.best_by_the_test(path, tests.recall_at),
            peak_memory_gib=records.peak_memory(),
            files=records.digests(path),
            wall_time_s=state.seconds + time.perf_counter() - begun,
            images_per_second=state.busy_seconds
            and state.step * self.sampler.batch_size / state.busy_seconds,
        )
        self._report()

    def _report(self) -> None:
        runs = [records.load_run(self.record.path)]
        console.say(reporting.compare(runs).terminal())
        if self.experiment.report is True:
            page = self.record.path / "report.html"
            reporting.write_html(runs, page)
            console.say(f"\nreport: {page}")

    def note_failure(self, error: BaseException, line: str | None) -> None:
        """Write into run.json why the run failed."""
        cause = error.__cause__ if isinstance(error, training.StepError) else None
        with suppress(OSError):
            self.record.update(
                status="failed",
                error=line or f"{type(error).__name__}: {console.reason(error)}",
                diverged=isinstance(error, records.NonFiniteError),
                traceback=cause and "".join(traceback.format_exception(cause)),
            )


if __name__ == "__main__":
    sys.exit(main())
