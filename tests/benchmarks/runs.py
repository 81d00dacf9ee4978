"""Runs of the runner in this process, or in those of a pool, with every step traced."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.records.files import write_json
from benchmarks.run import main
from benchmarks.training.loop import Pending, Trainer
from pml_regularizers.distributed import all_gather
from tests.support.pool import Pool, Processes

Trace = list[dict[str, Any]]

ATTENTION = "--model.attention={class_path: pml_regularizers.VEMAttention}"
PML = "pytorch_metric_learning.losses"


def added(class_path: str, weight: float = 1.0, **arguments: Any) -> str:
    """The option that adds a term to a run's losses."""
    term = {"loss": {"class_path": class_path, "init_args": arguments}, "weight": weight}
    return f"--losses+={json.dumps(term)}"


MEMORY = added(
    f"{PML}.CrossBatchMemory", memory_size=200, loss={"class_path": f"{PML}.ContrastiveLoss"}
)
REGULARIZERS = (
    added("pml_regularizers.EnergyConfusionRegularizer", 0.3, gradient="fc"),
    added("pml_regularizers.VarianceRegularizer"),
    added("pml_regularizers.JRDLoss", 0.5),
)


def finished(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run to the end without pictures; run.json."""
    forget()
    assert main([*arguments, "--report=false", f"--output={folder}"]) == 0
    return record_of(folder)


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


@contextmanager
def traced() -> Iterator[Trace]:
    """Image ids, loss and every gradient of each step of the run inside."""
    rows: Trace = []
    trainers: list[Trainer] = []
    run, add = Trainer.run, Pending.add

    def watched(trainer: Trainer, loader: Any) -> Any:
        trainers.append(trainer)
        return run(trainer, loader)

    def gradients(*hook: object) -> None:
        if not trainers:  # the trial step
            return
        state = trainers[0].state
        rows.append(
            {
                f"{owner}.{name.removeprefix('module.')}": parameter.grad.detach().clone()
                for owner, module in (("model", state.model), ("loss", state.loss))
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
        )

    def noted(pending: Pending, step: int, loss: Any, rate: float, indices: Any) -> None:
        several = trainers[0].state.accelerator.num_processes > 1
        ids = all_gather(indices)[0] if several else indices
        rows[-1] = {"ids": ids.tolist(), "loss": loss.clone(), "gradients": rows[-1]}
        add(pending, step, loss, rate, indices)

    handle = register_optimizer_step_pre_hook(gradients)
    with mock.patch.object(Trainer, "run", watched), mock.patch.object(Pending, "add", noted):
        try:
            yield rows
        finally:
            handle.remove()


def mark_unfinished(folder: Path) -> None:
    """Change a run as if it had been killed after its last checkpoint."""
    write_json(folder / "run.json", record_of(folder) | {"status": "running", "metrics": {}})


def forget() -> None:
    """Let the next run choose its own precision and processes: Accelerate keeps them for a process's life."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def adopt(processes: Processes) -> None:
    """Make Accelerate take the process group of a pool for its own."""
    rank, world = str(processes.process_index), str(processes.num_processes)
    os.environ |= {
        **{"ACCELERATE_USE_CPU": "true", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world},
        # Read by Accelerate, and not used: the pool's processes have met.
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    }
    forget()


def as_accelerator(processes: Processes) -> Accelerator:
    adopt(processes)
    return Accelerator()


def run_traced(processes: Processes, arguments: Sequence[str]) -> tuple[int, Trace]:
    """The exit status and the trace of a run on the processes of a pool."""
    adopt(processes)
    # The end of training would end the pool's group.
    with traced() as rows, mock.patch.object(Accelerator, "end_training"):
        return main([*arguments, "--report=false"]), rows


def same_on_all(
    pool: Pool, arguments: Sequence[str], folder: Path, numbers: Sequence[int]
) -> list[Trace]:
    """Train on each number of processes, into FOLDER/NUMBER, and hold all gradients against those of one process.

    Returns:
        The traces of the main processes, by number.
    """
    traces = []
    for processes in numbers:
        output = f"--output={folder / str(processes)}"
        found = pool.run(run_traced, [*arguments, output], processes=processes)
        assert [status for status, _ in found] == [0] * processes
        assert record_of(folder / str(processes))["world_size"] == processes
        traces.append(found[0][1])
    for trace in traces[1:]:
        assert_same_trace(trace, traces[0])
    return traces


def assert_same_trace(found: Trace, expected: Trace, tolerance: float = 1e-9) -> None:
    """The same images, losses and gradients at every step; a gradient's errors relative to its largest entry."""
    for step, wanted in zip(found, expected, strict=True):
        assert step["ids"] == wanted["ids"]
        torch.testing.assert_close(step["loss"], wanted["loss"], rtol=tolerance, atol=0)
        assert step["gradients"].keys() == wanted["gradients"].keys()
        for name, gradient in wanted["gradients"].items():
            atol = tolerance * max(gradient.abs().max().item(), 1e-3)
            torch.testing.assert_close(step["gradients"][name], gradient, rtol=0, atol=atol)
