"""Starts the runner as a user does: real processes, real signals, tiny settings."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "run.py"
TIMEOUT = 600  # seconds until what hangs is ended, also where a machine is busy

TINY = (
    "--data.max_classes=12",
    "--data.batch_size=60",
    "--data.samples_per_class=5",
    "--evaluation.every=0",
    "--optimization.steps=30",
)
# Layer normalisation instead of batch statistics, which no two numbers of processes share.
NO_BATCH_STATISTICS = ("--model.trunk=test_convnext", "--model.trunk_args={}")

# Of a trunk with weights, as those of a random one say nothing.
FROZEN_STATISTICS = (
    "--model.batch_norm=frozen_statistics",
    f"--model.weights={ROOT / 'benchmarks' / 'backbones' / 'glyphs' / 'seed0.safetensors'}",
)


def horde(base: str = "pml_regularizers.BinomialDevianceLoss", **settings: object) -> str:
    """The `losses` setting of a small HORDE."""
    arguments = {"order": 3, "moment_dim": 32, "projections": "cascaded", **settings}
    listed = "".join(f", {name}: {value}" for name, value in arguments.items())
    return (
        "--losses=[{loss: {class_path: pml_regularizers.HORDELoss, "
        f"init_args: {{loss: {{class_path: {base}}}{listed}}}}}}}]"
    )


def command(arguments: Sequence[str], processes: int = 1, script: Path = RUN) -> list[str]:
    """The command line of a script on one or several processes."""
    if processes == 1:
        return [sys.executable, str(script), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={processes}", str(script), *arguments]


def environment() -> dict[str, str]:
    """One thread, since results are compared to the bit; the CPU, also where there is a GPU."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return {**os.environ, **settings}


def popen(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command; its output is captured."""
    return subprocess.Popen(
        words,
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def start(
    arguments: Sequence[str], processes: int = 1, script: Path = RUN, **options: Any
) -> subprocess.Popen[str]:
    """Start a run; its output is captured."""
    return popen(command(arguments, processes, script), **options)


def run(arguments: Sequence[str], processes: int = 1, **options: Any) -> str:
    """Run to the end; the output. Fails unless it succeeds."""
    process = start(arguments, processes, **options)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    return output


def rows(folder: Path) -> int:
    """Steps that a run has logged so far."""
    path = folder / "records" / "training.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def wait_for_rows(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until a run has logged so many steps; fails if it ends before."""
    deadline = time.monotonic() + TIMEOUT
    while rows(folder) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{rows(folder)} of {count} steps after {TIMEOUT} s"
        time.sleep(0.02)
