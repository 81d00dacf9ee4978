"""One run, from its opened folder to its report."""

import signal
import time
from functools import partial
from typing import Any

from accelerate import Accelerator

from benchmarks.building.images import Datasets
from benchmarks.console.arguments import say
from benchmarks.console.printing import reason
from benchmarks.console.stopping import handle_signals
from benchmarks.evaluation.closed_form import head_of, read_features, save_head, set_head
from benchmarks.evaluation.curves import SELECTED_BY, Curves
from benchmarks.evaluation.outputs import (
    best_by_the_test,
    save_embeddings,
    save_neighbours,
    test_outputs,
    test_untrained,
    verified,
)
from benchmarks.evaluation.tester import Evaluator
from benchmarks.records.provenance import describe_data, now, peak_memory
from benchmarks.records.results import digests, load_run
from benchmarks.records.run_folder import RunFolderError, load_best
from benchmarks.records.run_writer import RunWriter
from benchmarks.records.steps import read_table
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.neighbours import Images
from benchmarks.reporting.report import write_html
from benchmarks.settings.data import num_workers
from benchmarks.settings.experiment import Experiment
from benchmarks.training.batches import training_loader
from benchmarks.training.cached_views import CachedViews
from benchmarks.training.loop import Trainer
from benchmarks.training.parts import build_parts, decoded, find_horde


def run(experiment: Experiment, record: RunWriter, accelerator: Accelerator) -> None:
    """Train, test and report; of a finished run, report.

    Raises:
        RunFolderError: if the run was started with other images, or its checkpoint is damaged or of another run.
    """
    data = experiment.data
    if record.finished:
        if accelerator.is_main_process:
            print(f"{record.path} is finished (delete it to run it again); its results:\n")
            report(experiment, record)
        return

    # Data, network, loss and optimizer, which have taken a trial step.
    state, datasets, sampler = build_parts(experiment, accelerator)
    about = describe_data(experiment, datasets, state.model.trunk)
    state.prepare(accelerator)
    workers = num_workers(data, accelerator.num_processes)
    sources: list[Any] = []  # what takes the place of the datasets, or None where it has none
    if data.cached_views is not None:
        workers = 0  # nothing is left to do for an image whose output is kept
        keep = partial(CachedViews, accelerator, state.model, experiment=experiment)
        train, *tested = datasets
        sources = [keep(train, test=not sampler.steps)]
        sources += [part and keep(part, test=True) for part in tested]
    elif data.decoded_gib is not None:
        sources = decoded(datasets, data, accelerator.device)

    saved = record.restore(about, datasets.test)
    if saved is not None:
        try:
            state.load_state_dict(saved)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"{record.path / 'checkpoints'}: the checkpoint does not fit the network, loss and optimizer of "
                f"these versions ({reason(error)}); continue with those that run.json names"
            ) from error
    record.begin(saved)
    handle_signals(stop)  # during the training: StopRequest's

    # Decoded images, or kept outputs, which are computed unless they are there.
    images = Datasets(*(part and part.open() for part in sources)) if sources else datasets
    evaluator = Evaluator(accelerator, state.model, experiment.evaluation.batch_size, workers)
    if state.step == 0:
        test_before_training(experiment, record, evaluator, images)
    curves = Curves(evaluator, images, experiment.evaluation, saved and saved["best"])
    trainer = Trainer(state, sampler, experiment, record, curves)
    if state.step < sampler.steps:
        sampler.step = state.step
        trainer.run(training_loader(accelerator, images.train, sampler, workers))
    elif not sampler.steps:
        trainer.save()
    if state.stopped_by is not None:
        record.update(wall_time_s=state.seconds)
        stop(state.stopped_by)
    test(experiment, record, trainer, images, datasets)
    if accelerator.is_main_process:
        report(experiment, record, datasets.test)


def stop(number: int, frame: object = None) -> None:
    handle_signals(signal.SIG_IGN)  # the run is saving now
    raise KeyboardInterrupt(number)


def test_before_training(
    experiment: Experiment, record: RunWriter, evaluator: Evaluator, images: Datasets
) -> None:
    """Set the head's layer, if it starts from the features, and test the network before its training.

    Under protocol "fair", only the untrained trunk is tested now, which chooses nothing.
    """
    model, tested = experiment.model, experiment.data.split == "test"
    from_features, trained = model.head in ("pca", "whitened"), None
    if from_features or (tested and head_of(evaluator) is not None):
        trained = read_features(evaluator, images.train)
    if from_features:
        assert trained is not None
        set_head(evaluator, trained, model.head, model.embedding_size)
    if tested:
        metrics, outputs, by_class = test_untrained(
            evaluator, trained, images.test, experiment.evaluation, model.embedding_size
        )
        before = None if experiment.protocol == "fair" else metrics
        record.update(before_training=before, outputs=outputs, per_class_of_outputs=by_class)


def test(
    experiment: Experiment,
    record: RunWriter,
    trainer: Trainer,
    images: Datasets,
    datasets: Datasets,
) -> None:
    """Test the trained network, or the one that validation classes chose, and record the result.

    Args:
        datasets: The images as they are, where `images` are outputs for them.
    """
    begun, path, tests = time.perf_counter(), record.path, experiment.evaluation
    state, evaluator, best = trainer.state, trainer.curves.evaluator, trainer.curves.best
    if best is not None:
        state.load_weights(load_best(path, best["step"], record.identity))
    layer = trained = None
    if kind := experiment.model.replacement:
        trained = read_features(evaluator, images.train)
        layer = set_head(evaluator, trained, kind, experiment.model.embedding_size)
    result, entries = test_outputs(
        evaluator, find_horde(state.loss), images.train, images.test, tests, trained
    )
    if experiment.data.split == "test":
        entries |= verified(result, experiment, evaluator.accelerator)
    if not evaluator.accelerator.is_main_process:
        return
    losses = read_table(path / "records", "training").get("loss", [])
    if layer is not None:
        save_head(path, layer)
    if experiment.report:
        save_neighbours(path, result)
    if tests.save_embeddings:
        save_embeddings(path, datasets.test, result.embeddings)
    for name in ("outputs", "per_class_of_outputs"):
        entries[name] |= record.info.get(name, {})  # of the network before training
    record.finish(
        state.step,
        **entries,
        finished=now(),
        never_acted=bool(losses) and not any(losses),
        selection=best and {"metric": SELECTED_BY, **best},
        oracle=best_by_the_test(path, tests.recall_at),
        peak_memory_gib=peak_memory(),
        files=digests(path),
        wall_time_s=state.seconds + time.perf_counter() - begun,
        images_per_second=state.busy_seconds
        and state.step * experiment.data.batch_size / state.busy_seconds,
    )


def report(experiment: Experiment, record: RunWriter, images: Images | None = None) -> None:
    """Print the result, and draw its page, with neighbours where the images are at hand."""
    runs = [load_run(record.path)]
    comparison = compare(runs)
    say(comparison.terminal())
    if experiment.report is True:
        page = record.path / "report.html"
        write_html(runs, comparison, page, images)
        say(f"\nreport: {page}")
