"""The training loop, on one process or many.

What happens at a step is a function of the seed and the step alone: which images, how each is augmented,
and every random number drawn in the network, the miner and the loss. A checkpoint therefore stores
nothing of any generator, and a run that goes on from it ends as if it had never stopped.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.progress import progress_bar
from benchmarks.signals import StopHandler
from benchmarks.workers import ignore_signals
from pml_regularizers import gradient_norm_ratios, record_terms
from pml_regularizers.distributed import all_gather

Key = tuple[int, int]
"""What a batch asks the dataset for: (index of the image, seed of its augmentation)."""


class NonFiniteLossError(RuntimeError):
    """The loss or the weights are nan or infinite; names the step, and the images of a loss."""


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """In which order an epoch shows its images or classes; step after step asks for the same one."""
    order = np.random.default_rng((seed, 0, epoch)).permutation(count)
    order.flags.writeable = False
    return order


class StepSampler(Sampler[list[Key]]):
    """Batches that are each a pure function of (seed, step), so that the next step is all the state there is.

    Args:
        batch_size: Images of a batch, over all processes.
        steps: Batches in the whole training.
        seed: Of everything drawn here.
    """

    drop_last = True

    def __init__(self, *, batch_size: int, steps: int, seed: int) -> None:
        self.batch_size = batch_size
        self.steps = steps
        self.seed = seed
        self.step = 0

    def batch(self, step: int) -> list[Key]:
        """The batch of a step."""
        raise NotImplementedError

    def _keys(self, indices: np.ndarray, rng: np.random.Generator) -> list[Key]:
        seeds = rng.integers(2**63, size=len(indices))
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.step, self.steps):
            yield self.batch(step)

    def __len__(self) -> int:
        return self.steps - self.step

    def state_dict(self) -> dict[str, int]:
        """The next step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next iteration at that step."""
        self.step = state["step"]


class ShuffledBatchSampler(StepSampler):
    """Batches of images of any classes: shuffled epochs, one after the other, cut into batches of one size.

    An epoch shows every image once. Where an epoch ends inside a batch, the next one fills it.

    Args:
        images: Number of images.
        **kwargs: As in `StepSampler`.

    Raises:
        ValueError: if there are fewer images than a batch needs.
    """

    def __init__(self, images: int, **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.images = images
        if images < self.batch_size:
            raise ValueError(f"data.batch_size: {self.batch_size} images, but there are {images}")

    def batch(self, step: int) -> list[Key]:
        epoch, start = divmod(step * self.batch_size, self.images)
        parts = [epoch_order(self.seed, epoch, self.images)[start : start + self.batch_size]]
        if lacking := self.batch_size - len(parts[0]):
            parts.append(epoch_order(self.seed, epoch + 1, self.images)[:lacking])
        return self._keys(np.concatenate(parts), np.random.default_rng((self.seed, 1, step)))


class ClassBatchSampler(StepSampler):
    """Batches of P classes x M images, class by class.

    An epoch shows every class once, in an order seeded by (seed, epoch), in batches of P; the classes
    that do not fill a batch wait for another epoch. An image repeats within a batch only if its class
    has fewer than M.

    Args:
        labels: (n,) integers, the class of each image.
        samples_per_class: M.
        **kwargs: As in `StepSampler`; batch_size is P M.

    Raises:
        ValueError: if there are fewer than P classes.
    """

    def __init__(self, labels: Tensor, *, samples_per_class: int, **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.samples_per_class = samples_per_class
        self.classes_per_batch = self.batch_size // samples_per_class
        order = np.argsort(labels.numpy(), kind="stable")
        _, counts = np.unique(labels.numpy(), return_counts=True)
        self._images = np.split(order, np.cumsum(counts)[:-1])
        if len(self._images) < self.classes_per_batch:
            raise ValueError(
                f"data.batch_size: {self.batch_size} images, {samples_per_class} per class, need "
                f"{self.classes_per_batch} classes, but there are {len(self._images)}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches that show every class once, but for an incomplete last one."""
        return len(self._images) // self.classes_per_batch

    def batch(self, step: int) -> list[Key]:
        epoch, place = divmod(step, self.steps_per_epoch)
        classes = epoch_order(self.seed, epoch, len(self._images))
        chosen = classes[place * self.classes_per_batch :][: self.classes_per_batch]
        rng = np.random.default_rng((self.seed, 1, step))
        return self._keys(np.concatenate([self._draw(self._images[c], rng) for c in chosen]), rng)

    def _draw(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rounds = -(-self.samples_per_class // len(images))
        return np.concatenate([rng.permutation(images) for _ in range(rounds)])[
            : self.samples_per_class
        ]


class StopRequest(StopHandler):
    """Turns the first SIGINT or SIGTERM into a flag that the loop reads; a second one acts as usual.

    `accelerate launch` of one process hands no signal on when it is stopped: its end is read as SIGTERM.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signal: int | None = None
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # what it sets for its processes
        self._launcher = os.getppid() if launched else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop."""
        if self._launcher not in (None, os.getppid()) and self.signal is None:
            self.signal = signal.SIGTERM
        if accelerator.num_processes == 1:
            return self.signal is not None
        asked = torch.tensor(float(self.signal or 0), device=accelerator.device)
        largest = accelerator.gather(asked.view(1)).max().item()
        self.signal = int(largest) or None
        return self.signal is not None


def training_loader(
    accelerator: Accelerator, dataset: Dataset[Any], sampler: StepSampler, num_workers: int
) -> Any:
    """Batches of (images, labels, indices), each process's part of them."""
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=accelerator.device.type == "cuda",
        worker_init_fn=ignore_signals,
    )
    return accelerator.prepare_data_loader(loader)


@dataclass
class Progress:
    """What the loop has done."""

    step: int = 0
    seconds: float = 0.0
    """Since the start, evaluations and checkpoints included."""
    busy_seconds: float = 0.0
    """In training steps alone."""
    stopped_by: int | None = None


@dataclass
class Trainer:
    """Moves the network and the loss, and tells others when to look.

    Args:
        accelerator: With `split_batches=True`, so that a batch is the same on any number of processes.
        model: The prepared network.
        loss: The prepared `DistributedLoss`.
        optimizer: The prepared optimizer.
        scheduler: Steps with every batch, or None.
        sampler: Says which images.
        seed: Of what is drawn inside a step.
        dtype: Of the images.
        max_gradient_norm: See `experiment.Optimization`, as for the next one.
        chunk_size: Images that the trunk sees at a time, or None.
        diagnose_every: See `experiment.Experiment`.
        log_every: Steps between two looks at the loss; also what is logged together.
    """

    accelerator: Accelerator
    model: nn.Module
    loss: nn.Module
    optimizer: Any
    scheduler: Any
    sampler: StepSampler
    seed: int
    dtype: torch.dtype = torch.float32
    max_gradient_norm: float | None = None
    chunk_size: int | None = None
    diagnose_every: int = 0
    log_every: int = 10

    def run(
        self,
        loader: Any,
        progress: Progress,
        *,
        log: Callable[[list[tuple[int, dict[str, float]]]], None],
        diagnose: Callable[[int, dict[str, float]], None],
        checkpoint: Callable[[Progress], None],
        checkpoint_every: int,
        evaluate: Callable[[int], None],
        evaluate_every: int,
        trace: "Trace | None" = None,
    ) -> None:
        """Train from `progress.step` to the sampler's last step, or until asked to stop.

        Rows are logged before the checkpoint of their step is written.

        Raises:
            NonFiniteLossError: before any checkpoint that holds its consequences.
        """
        self.model.train()
        start, begun = progress.seconds, time.perf_counter()
        pending = Pending(self, log)
        with (
            StopRequest() as stop,
            progress_bar(
                total=self.sampler.steps,
                initial=progress.step,
                desc="training",
                unit="step",
                shown=self.accelerator.is_main_process,
            ) as bar,
        ):
            for images, labels, indices in loader:
                rate = self.optimizer.param_groups[0]["lr"]
                value = self._step(progress.step, images, labels, indices, trace, diagnose)
                progress.step += 1
                progress.seconds = start + time.perf_counter() - begun
                pending.add(progress.step, value, rate, indices)
                bar.update()

                last = progress.step == self.sampler.steps
                due = progress.step % checkpoint_every == 0 or last
                measure = evaluate_every > 0 and (progress.step % evaluate_every == 0 or last)
                look = progress.step % self.log_every == 0 or due or measure
                # To ask more often would make a GPU wait.
                if look or self.accelerator.device.type == "cpu":
                    look |= stop.agreed(self.accelerator)
                    progress.stopped_by = stop.signal
                if look:
                    bar.set_postfix(pending.flush(progress), refresh=False)
                if measure or due or progress.stopped_by is not None:
                    self._check_weights(progress.step)
                if measure:
                    evaluate(progress.step)
                if due or progress.stopped_by is not None:
                    progress.seconds = start + time.perf_counter() - begun
                    checkpoint(progress)
                if progress.stopped_by is not None:
                    return
                if measure or due:
                    pending.resume()

    def _check_weights(self, step: int) -> None:
        for owner in (self.model, self.loss):
            for name, tensor in owner.state_dict().items():
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise NonFiniteLossError(
                        f"{name} is not finite after step {step}; lower the learning rate, or clip the "
                        "gradient (optimization.max_gradient_norm)"
                    )

    def _step(
        self,
        step: int,
        images: Tensor,
        labels: Tensor,
        indices: Tensor,
        trace: "Trace | None",
        diagnose: Callable[[int, dict[str, float]], None],
    ) -> Tensor:
        seed_generators((self.seed * 1_000_003 + step) % 2**32, images.device)
        images = images.to(self.dtype)
        if self.chunk_size is not None:
            chunks = TrunkChunks(self.accelerator, self.model, images, self.chunk_size)
            embeddings = chunks.embed()
        else:
            embeddings = self.model(images)
        if self.diagnose_every and (step + 1) % self.diagnose_every == 0:
            model = self.accelerator.unwrap_model(self.model)
            loss, ratios = gradient_ratios(self.loss, model, embeddings, labels)
            diagnose(step + 1, ratios)
        else:
            loss = self.loss(embeddings, labels)
        self.accelerator.backward(loss)
        if self.chunk_size is not None:
            chunks.backward()
        if trace is not None:
            trace.add(step, self, loss, indices)
        if self.max_gradient_norm is not None:
            parameters = [*self.model.parameters(), *self.loss.parameters()]
            self.accelerator.clip_grad_norm_(parameters, self.max_gradient_norm)
        self.optimizer.step()
        if self.scheduler is not None and not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a step may draw from: Python's, numpy's, torch's on the CPU and on its device.

    `accelerate.utils.set_seed` seeds every kind of device and formats a stack trace for each that is not there,
    which takes longer than all the rest of the loop's own work.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  miners draw from it
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class TrunkChunks:
    """Gradient caching: the exact gradient of a loss of the whole batch, with the trunk run in chunks.

    The trunk runs without a graph, the head and the loss on the whole batch; then the trunk runs again, chunk by
    chunk, with the gradient that reached its output. Its random numbers are the same in both passes. Gao, Zhang,
    Han and Callan, "Scaling deep contrastive learning batch size under memory limited setup" (RepL4NLP 2021), cut
    behind the embeddings; here the cut is behind the trunk, so that losses may read what the head computes.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, images: Tensor, chunk_size: int
    ) -> None:
        self._accelerator = accelerator
        self._model: Any = accelerator.unwrap_model(model)
        self._chunks = images.split(chunk_size)
        self._seed = torch.initial_seed()

    def embed(self) -> Tensor:
        """The embeddings of the batch, with a graph down to the trunk's output."""
        with torch.no_grad():
            outputs = [self._trunk(i) for i in range(len(self._chunks))]
        self._output = torch.cat(outputs).requires_grad_()
        with self._accelerator.autocast():
            embeddings: Tensor = self._model.head(self._output)
        return embeddings.float() if self._output.dtype != torch.float64 else embeddings

    def backward(self) -> None:
        """Once the loss went backward: the trunk's gradient, averaged over processes as DDP does it."""
        assert self._output.grad is not None
        rows = self._output.grad.split([len(chunk) for chunk in self._chunks])
        for i, gradient in enumerate(rows):
            self._trunk(i).backward(gradient)
        if self._accelerator.num_processes > 1:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")

    def _trunk(self, i: int) -> Tensor:
        with torch.random.fork_rng(), self._accelerator.autocast():
            torch.manual_seed((self._seed + i + 1) % 2**64)
            output: Tensor = self._model.trunk(self._chunks[i])
        return output


def gradient_ratios(
    loss: nn.Module, model: Any, embeddings: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch, and how strong each of its terms is beside the first.

    Returns:
        The loss, and `{"TERM at PLACE": ratio}` of gradient norms, at the embeddings, the head and the trunk.

    Raises:
        ValueError: if the loss has one term only, or a place is frozen.
    """
    with record_terms(loss) as terms:
        value: Tensor = loss(embeddings, labels)
    places = {
        "embeddings": embeddings,
        "head": model.head.parameters(),
        "trunk": model.trunk.parameters(),
    }
    ratios = gradient_norm_ratios(terms, base=next(iter(terms)), at=places)
    named = {
        f"{term} at {place}": ratio for term, at in ratios.items() for place, ratio in at.items()
    }
    return value, named


class Pending:
    """Losses that were not looked at yet: reading one waits for the device, so it is done rarely."""

    def __init__(
        self, trainer: Trainer, log: Callable[[list[tuple[int, dict[str, float]]]], None]
    ) -> None:
        self._trainer = trainer
        self._log = log
        self._rows: list[tuple[int, Tensor, float, Tensor]] = []
        self._since = time.perf_counter()

    def add(self, step: int, loss: Tensor, rate: float, indices: Tensor) -> None:
        self._rows.append((step, loss, rate, indices))

    def resume(self) -> None:
        """Count the time from here: something else was done in between."""
        self._since = time.perf_counter()

    def flush(self, progress: Progress) -> dict[str, str]:
        """Check and log what is pending; what the progress bar shows."""
        losses = torch.stack([loss.double() for _, loss, _, _ in self._rows]).tolist()
        now = time.perf_counter()
        progress.busy_seconds += now - self._since
        speed = len(losses) * self._trainer.sampler.batch_size / (now - self._since)
        rows = []
        for value, (step, _, rate, indices) in zip(losses, self._rows, strict=True):
            if not np.isfinite(value):
                raise NonFiniteLossError(
                    f"the loss is {value} at step {step}, images {indices.tolist()}; lower the learning "
                    "rate, clip the gradient (optimization.max_gradient_norm), or look at these images"
                )
            rows.append((step, {"loss": value, "learning_rate": rate, "images_per_second": speed}))
        self._log(rows)
        self._rows, self._since = [], now
        return {"loss": f"{losses[-1]:.4g}", "images/s": f"{speed:.0f}"}


class Trace:
    """Image ids, loss and every gradient of the first steps, to compare runs with each other.

    A run that goes on from step `start` keeps the steps before it.
    """

    def __init__(self, path: Path, steps: int, start: int) -> None:
        self.path = path
        self.steps = steps
        self._rows: list[dict[str, Any]] = []
        if start and path.exists():
            self._rows = torch.load(path, weights_only=True)[:start]

    def add(self, step: int, trainer: Trainer, loss: Tensor, indices: Tensor) -> None:
        """Note one step and write the file; all processes must call it."""
        if step >= self.steps:
            return
        several = trainer.accelerator.num_processes > 1
        ids = all_gather(indices) if several else indices
        gradients = {
            f"{owner}.{name.removeprefix('module.')}": parameter.grad.detach().cpu().clone()
            for owner, module in (("model", trainer.model), ("loss", trainer.loss))
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        self._rows.append(
            {
                "step": step,
                "world_size": trainer.accelerator.num_processes,
                "ids": ids.tolist(),
                "loss": loss.detach().cpu(),
                "gradients": gradients,
            }
        )
        if trainer.accelerator.is_main_process:
            temporary = self.path.with_suffix(".tmp")
            torch.save(self._rows, temporary)
            temporary.replace(self.path)
