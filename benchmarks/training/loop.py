"""The training loop, on one process or many.

A step is a function of only the seed and the step's number: its images, their augmentation, and every random
number drawn in the network, the miner and the loss. A checkpoint therefore stores no generator's state, and a run
that continues from it ends as if it had never stopped.
"""

import random
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.console.printing import PrintableError, progress_bar, reason
from benchmarks.console.stopping import StopRequest
from benchmarks.evaluation.curves import Curves
from benchmarks.records.results import NonFiniteError
from benchmarks.records.run_writer import RunWriter
from benchmarks.records.steps import Row
from benchmarks.settings.experiment import Experiment
from benchmarks.training.batches import StepSampler
from benchmarks.training.state import TrainingState
from pml_regularizers import GradientCache
from pml_regularizers.functional.precision import in_float64
from pml_regularizers.gradient_ratios import capture_loss_terms, gradient_norm_ratios, term_names


class StepError(PrintableError):
    """Error: the network, the loss, the miner or the optimizer raised one in a step: its cause."""


class Due(NamedTuple):
    """What is to be done after a step, in this order: a checkpoint vouches for all that was recorded before it."""

    log: bool
    evaluate: bool
    save: bool


@dataclass(eq=False)
class Trainer:
    """Trains the network and the loss, and logs, tests and saves them when it is due, on all processes.

    Args:
        state: The prepared parts, on an accelerator with `split_batches=True`, so that a batch is the same on any
            number of processes.
        sampler: The images of each step.
        experiment: Gives the seed, and the steps at which something is due.
        record: Gets the rows, the checkpoints and the best weights.
        curves: Measures the network, and chooses the best weights.
    """

    state: TrainingState
    sampler: StepSampler
    experiment: Experiment
    record: RunWriter
    curves: Curves

    def __post_init__(self) -> None:
        # record-keeper reads its whole csv file again for every group of rows.
        self.log_every = max(10, self.sampler.steps // 200)
        self._is_sum = bool(term_names(self.state.loss))
        chunk_size = self.experiment.optimization.chunk_size
        self._cache = chunk_size and GradientCache(self.state.model, self.state.loss, chunk_size)

    def run(self, loader: Any) -> None:
        """Train to the sampler's last step, or until asked to stop: then `state.stopped_by` is the signal.

        Raises:
            NonFiniteError: for a NaN or infinity, before any checkpoint that would contain its effects.
            StepError: for any error in the computation of a step.
        """
        state, accelerator = self.state, self.state.accelerator
        start, begun = state.seconds, time.perf_counter()
        bar = progress_bar(
            total=self.sampler.steps,
            initial=state.step,
            desc="training",
            unit="step",
            shown=accelerator.is_main_process,
        )
        with StopRequest() as stop, bar:
            if state.step == 0 and self.due().evaluate:
                self._evaluate()
            state.model.train()
            pending = Pending(self.sampler.batch_size)
            noted: dict[str, list[Row]] = {}  # rows of other tables since the last log
            for images, labels, indices in loader:
                rate = state.optimizer.param_groups[0]["lr"]
                try:
                    value, measured = self._step(images, labels)
                except Exception as error:
                    failed = f"step {state.step + 1} failed: {type(error).__name__}"
                    raise StepError(f"{failed}: {reason(error)}") from error
                state.step += 1
                pending.add(state.step, value, rate, indices)
                bar.update()
                for table, row in measured.items():
                    noted.setdefault(table, []).append((state.step, row))

                due = self.due()
                # More frequent checks would make a GPU wait.
                if any(due) or accelerator.device.type == "cpu":
                    due = self.due(stopping=stop.agreed(accelerator))
                    state.stopped_by = stop.signal
                if due.log:
                    losses, shown = pending.flush(state)
                    bar.set_postfix(shown, refresh=False)
                    self.record.log({"training": losses, **noted})
                    noted = {}
                if due.evaluate or due.save:
                    self._check_weights()
                if due.evaluate:
                    self._evaluate()
                    state.model.train()
                if due.save:
                    state.seconds = start + time.perf_counter() - begun
                    self.save()
                if state.stopped_by is not None:
                    return
                if due.evaluate or due.save:  # its clock does not count them
                    pending = Pending(self.sampler.batch_size)

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, dict[str, float]]]:
        """The loss, its terms and, when due, the ratios of their gradients, by table."""
        state, step, diagnose_every = self.state, self.state.step, self.experiment.diagnose_every
        measured: dict[str, dict[str, float]] = {}
        seed_generators((self.experiment.seed * 1_000_003 + step) % 2**32, images.device)
        network = self._cache or state.model
        embeddings = network(images.to(next(state.model.parameters()).dtype))
        diagnose = diagnose_every > 0 and (step + 1) % diagnose_every == 0
        note_terms = self._is_sum and (step + 1) % self.log_every == 0
        with captured_terms(state.loss, diagnose or note_terms) as terms:
            value = state.loss(embeddings, labels)
        if note_terms:
            measured["terms"] = {name: term.item() for name, term in terms.items()}
        if diagnose:
            bare = state.accelerator.unwrap_model(state.model)
            measured["gradient_ratios"] = gradient_ratios(terms, bare, embeddings)
        state.accelerator.backward(value)
        state.optimizer.step()
        if state.scheduler is not None and not state.accelerator.optimizer_step_was_skipped:
            state.scheduler.step()
        state.optimizer.zero_grad()
        return value.detach(), measured

    def due(self, *, stopping: bool = False) -> Due:
        """What is due now: after the last step everything, before the first one at most an evaluation.

        Args:
            stopping: The last step was the last one for now: it is saved.
        """
        step, last = self.state.step, self.state.step == self.sampler.steps
        every = self.experiment.evaluation.every  # 0: never
        evaluate = every > 0 and (step % every == 0 or last)
        if step == 0:
            return Due(False, evaluate, False)
        save = step % self.experiment.checkpoint_every == 0 or last or stopping
        log = step % self.log_every == 0 or evaluate or save
        return Due(log, evaluate, save)

    def save(self) -> None:
        """Write a checkpoint."""
        self.record.save(self.state.step, self.state.state_dict() | {"best": self.curves.best})

    def _evaluate(self) -> None:
        """Measure a point of the curves, in evaluation mode, and keep the weights if they are the best."""
        before, step = self.curves.best, self.state.step
        rows: dict[str, list[Row]] = {"evaluation": [(step, self.curves.point(step))]}
        if self.curves.best != before:
            self.record.save_best(step, self.state.weights())
        if self.experiment.evaluation.oracle and step:
            rows["oracle"] = [(step, self.curves.oracle())]
        self.record.log(rows)

    def _check_weights(self) -> None:
        for owner in (self.state.model, self.state.loss):
            for name, tensor in owner.state_dict().items():
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise NonFiniteError(
                        f"{name} is not finite after step {self.state.step}; lower the learning rate"
                    )


def captured_terms(loss: nn.Module, needed: bool) -> AbstractContextManager[dict[str, Tensor]]:
    """`capture_loss_terms`; without a need for them, no terms."""
    return capture_loss_terms(loss) if needed else nullcontext({})


def gradient_ratios(
    terms: Mapping[str, Tensor], model: Any, embeddings: Tensor
) -> dict[str, float]:
    """`{"TERM at PLACE": ratio}`: the gradient norm of each term of a loss, relative to the first term's.

    Raises:
        ValueError: if a place is frozen.
    """
    places = {"embeddings": embeddings, "head": model.head, "trunk": model.trunk}
    ratios = gradient_norm_ratios(terms, base=next(iter(terms)), at=places)
    return {
        f"{term} at {place}": ratio for term, at in ratios.items() for place, ratio in at.items()
    }


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a step may use: Python's, numpy's, torch's on the CPU and on its device.

    `accelerate.utils.set_seed` formats a stack trace for each kind of device that is missing, which takes longer
    than the rest of the loop's own work.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  miners draw from it
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@dataclass
class Pending:
    """Losses that are not read yet: reading waits for the device, so it is done rarely."""

    batch_size: int
    rows: list[tuple[int, Tensor, float, Tensor]] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    def add(self, step: int, loss: Tensor, rate: float, indices: Tensor) -> None:
        self.rows.append((step, loss, rate, indices))

    def flush(self, state: TrainingState) -> tuple[list[Row], dict[str, str]]:
        """The rows to log, checked, and the text of the progress bar."""
        losses = in_float64(torch.stack([loss for _, loss, _, _ in self.rows])).tolist()
        now = time.perf_counter()
        state.busy_seconds += now - self.since
        speed = len(losses) * self.batch_size / (now - self.since)
        rows: list[Row] = []
        for value, (step, _, rate, indices) in zip(losses, self.rows, strict=True):
            if not np.isfinite(value):
                rate_too = "lower the learning rate, or " if step > 1 else ""
                raise NonFiniteError(
                    f"the loss is {value} at step {step}, images {indices.tolist()}; {rate_too}look at these "
                    "images and at the loss's arguments"
                )
            rows.append((step, {"loss": value, "learning_rate": rate, "images_per_second": speed}))
        self.rows, self.since = [], now
        return rows, {"loss": f"{losses[-1]:.4g}", "images/s": f"{speed:.0f}"}
