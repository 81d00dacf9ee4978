"""The parts of `make gpu`, in the order in which they run; without a GPU, the same at tiny sizes.

The first line of a part's docstring is its title on the page docs/gpu.md, the others are its text there.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reporting import Table
from tests.gpu.correctness import (
    check_channels_last,
    check_compiled,
    check_losses,
    check_moments,
    check_processes,
    check_scaler,
    check_trunk,
)
from tests.gpu.networks import start_processes
from tests.gpu.part import Part
from tests.gpu.retrieval import Retrieval
from tests.gpu.steps import (
    measure_blocks,
    measure_compiled,
    measure_losses_alone,
    measure_steps,
    tell_rates,
)
from tests.gpu.timing import Rates, matmul_precision

TRUNKS = ("resnet50", "googlenet")


@pytest.mark.slow
def test_correctness(part: Part) -> None:
    """Losses, moments, ranks and processes against float64.

    Every loss with the gradients of its inputs and parameters: in float32, and under autocast on inputs in bfloat16
    and float16, whose gradients pass through a scale as a `GradScaler`'s; the float64 is the CPU's. HORDE's moments
    at the paper's size, and whole networks: against plain autograd in float64 on the GPU. TF32 is off, except where
    a line says TF32. Ranks: against sorted distances in float64. Two processes that share the GPU by gloo, and one
    with NCCL: against one process with the whole batch, all in float64.
    """
    with tempfile.TemporaryDirectory() as folder:
        started: list[Any] = []
        start = partial(start_processes, part.device.type, folder)
        part.run("start of processes", 20, lambda: started.append(start()))
        part.run("losses", 15, partial(check_losses, part))
        for kind in ("trained", "random", "sketched"):
            part.run(f"{kind} moments", 8, partial(check_moments, part, kind))
        part.run("ranks", 4, lambda: Retrieval(part, 3000, 64, 400, (1, 10, 50)).check(1e-6))
        for trunk in TRUNKS[: 1 if part.tiny else 2]:
            part.run(trunk, 8, partial(check_trunk, part, trunk))
        for processes in started:
            part.run("processes", 0, partial(check_processes, part, processes, folder))
        part.run("torch.compile", 20, partial(check_compiled, part))


@pytest.mark.slow
def test_steps(part: Part) -> None:
    """Whole training steps with each method.

    A step is the forward and backward pass of ResNet-50 or GoogLeNet at 256 px, a head of 512 and a loss, and fused
    Adam, under autocast to bfloat16, in channels_last; products in float32 run in TF32. HORDE's default are
    sketches of orders 2 and 3 with d = 1024; random and cascaded ones have the paper's K = 5 and d = 8192. Extra is
    what a step takes longer than with binomial deviance alone. The floor is the time that its added matrix products
    and passes over memory take at the rates of this card, which the first table gives; `tests/gpu/floors.py` counts
    them. Launches of kernels are not in the floor: what adds next to no work still has to launch, and the
    loss-alone table shows how much of this the host does. Memory is the growth of the peak of torch's allocator in
    a step.
    """
    rates: list[Rates] = []
    part.run("rates of the card", 3, lambda: rates.append(tell_rates(part)))
    benchmark = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False)
    with benchmark, matmul_precision("high"):  # as in a training that shall be fast
        for images, seconds in ((40, 14), (112, 18))[: 1 if part.tiny else 2]:
            for trunk in TRUNKS[: 1 if part.tiny else 2]:
                measure = partial(measure_steps, part, trunk, images, rates)
                part.run(f"{trunk}, {images} images", seconds, measure)
        part.run("block sizes", 8, partial(measure_blocks, part))
        part.run("the loss alone", 12, partial(measure_losses_alone, part))
        part.run("torch.compile of the loss", 15, partial(measure_compiled, part))


def test_retrieval(part: Part) -> None:
    """Evaluation at the size of Stanford Online Products.

    Recall@1, 10, 100, 1000, MAP@R and R-precision of 60,502 random vectors of 512 in 11,316 classes, each among all
    others. The accuracies of `RankAccuracyCalculator` are compared with those from all distances in float64 on the
    GPU, from which rare near ties differ. Times: one matrix product with all distances, in blocks of 1,024 queries,
    is the floor; then the same with torch's `topk` of 1,000; `RankAccuracyCalculator`; and PML's
    `AccuracyCalculator` with PML's own search by torch for k = 1,000 neighbours, which knows no Recall@K beyond
    Precision@1.
    """
    retrieval = Retrieval(part, 60_502, 512, 11_316, (1, 10, 100, 1000))
    part.run("accuracies against float64", 4, partial(retrieval.check, 1e-4))
    part.run("times", 4, retrieval.measure)
    part.run("PML's AccuracyCalculator", 12, retrieval.measure_pml)


def test_float16(part: Part) -> None:
    """float16 with a scaler, and channels_last.

    The loss of HORDE behind ResNet-50 in float16, against float64 on the GPU. A scale that makes gradients infinite
    must leave all weights as they are, and be halved; in later steps, at a scale of 1024, the loss must fall. Maps
    in channels_last must give HORDE the value and the gradients of contiguous ones.
    """
    part.run("float16 with a scaler", 8, partial(check_scaler, part))
    part.run("channels_last", 3, partial(check_channels_last, part))


@pytest.mark.slow
def test_glyphs(part: Part, glyphs_root: Path) -> None:
    """A run on Glyphs by the runner.

    `benchmarks/run.py --recipe glyphs/demo/binomial_horde`, shortened to 300 steps of 80 images of 32 px. Its
    images per second are those of the training steps, without tests and checkpoints. The loss must fall.
    """
    from benchmarks.records import load_run
    from benchmarks.run import main

    words = ["--recipe=glyphs/demo/binomial_horde", "--report=false", "--evaluation.every=0"]
    words += ["--data.max_classes=24"] if part.tiny else []
    words += [f"--optimization.steps={2 if part.tiny else 300}"]
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words, f"--data.root={glyphs_root}", f"--output={folder}/run"]) == 0
        run = load_run(Path(folder, "run"))
        losses = run.table("training")["loss"]
    about = run.info
    rows = [["images per second", f"{about['images_per_second']:.0f}"]]
    rows += [["Recall@1 at the end", f"{about['metrics']['recall_at_1']:.3f}"]]
    if gibibytes := about["peak_memory_gib"].get("gpu"):
        rows += [["peak memory on the GPU", f"{gibibytes:.2f} GiB"]]
    rows += [["loss at first and at the end", f"{losses[0]:.4g}, {losses[-1]:.4g}"]]
    part.tell(Table(["the run", ""], rows).markdown())
    rose = f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
    assert part.tiny or losses[-1] < losses[0], rose
