"""The parts of `make gpu`; without a GPU, the same checks and measurements at tiny sizes.

The first line of a part's docstring is its title on the page docs/gpu.md, the others are its text there.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.records import load_run
from benchmarks.reporting import Table, compare
from benchmarks.speed.measuring import Comparison, tensor_bytes
from pml_regularizers.functional import products
from pml_regularizers.functional import sketches as convolutions
from tests.gpu.networks import TERMS, Objective, behind, loss_and_gradients
from tests.gpu.part import Part

Device = torch.device
CPU = torch.device("cpu")

FLOAT32, TF32, BFLOAT16 = 1e-4, 2**-8, 2**-6
"""Bounds of errors. TF32 rounds to 10 bits, bfloat16 to 7; five orders multiply the error, a mean divides it."""

KINDS = {"stored": False, "recomputed": True}
"""Titles of `checkpoint`."""

TRUNKS = ("resnet50", "googlenet")

DEMO_RECALL = 0.2284
"""Recall@1 of `glyphs/demo/binomial_horde` on a CPU, one seed."""


def measure_blocks(
    part: Part, module: Any, name: str, run: Callable[[], object], title: str, size: str
) -> None:
    """Time a function at each power of two as a block size of a module; the first row has the value set."""

    def at(block: int) -> object:
        with mock.patch.object(module, name, block):
            return run()

    blocks = [getattr(module, name), *(2**k for k in ((8, 10) if part.tiny else range(18, 27)))]
    rows = {f"{block:,}": partial(at, block) for block in blocks}
    part.measure(Comparison(f"{title}, {name}", size, rows))


# ------------------------------------------------------------------------------------------ HORDE


def _factors(N: int, P: int, C: int, d: int, K: int) -> tuple[list[Tensor], Tensor]:
    """Features with K matrices, and gradients for orders 2 to K, all in float64."""
    x = torch.randn(N, P, C, dtype=torch.float64)
    matrices = torch.randn(K, C, d, dtype=torch.float64) / C**0.5
    return [x, *matrices], torch.randn(K - 1, N, d, dtype=torch.float64)


def _leaves(tensors: Sequence[Tensor], device: Device, dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(device, dtype, copy=True).requires_grad_() for tensor in tensors]


def _sums(inputs: list[Tensor], gradient: Tensor, **options: Any) -> list[Tensor]:
    """The library's sums of products, and the gradients of all inputs."""
    x, *matrices = inputs
    sums = products.summed_products(x, matrices, 2, x.dtype, **options)
    return [sums, *torch.autograd.grad(sums, inputs, gradient.to(sums))]


def test_horde(part: Part) -> None:
    """HORDE's moments, stored and recomputed.

    First, times and bytes against matrix products alone. Then the sums at the paper's size, and their times for
    each power of two as block size of `functional/products.py`: `GPU_BLOCK`, stored and recomputed.
    The first row has the value that is set. Expected: the same sums by plain autograd in float32.
    """
    from benchmarks.speed.cases import horde_moments

    tiny, device = part.tiny, part.device

    part.measure(horde_moments(tiny, device))
    N, P, C, d, K = (2, 19, 5, 300, 3) if tiny else (40, 64, 1024, 8192, 5)
    tensors, gradient = _factors(N, P, C, d, K)
    inputs, gradient = _leaves(tensors, device, torch.float32), gradient.to(device, torch.float32)

    size = f"{N} maps of {P} positions and {C} channels, {K} orders of {d}, float32"
    phi = torch.stack([inputs[0] @ matrix for matrix in inputs[1:]]).cumprod(dim=0)
    sums = phi[1:].sum(dim=2)
    expected = [sums, *torch.autograd.grad(sums, inputs, gradient)]
    for title, checkpoint in KINDS.items():
        step = partial(_sums, inputs, gradient, checkpoint=checkpoint)
        part.check(title, step(), expected, FLOAT32)
        measure_blocks(part, products, "GPU_BLOCK", step, title, size)


def test_sketches(part: Part) -> None:
    """HORDE's moments by tensor sketches.

    Sums and their gradient in float32, stored and recomputed. Expected: the convolutions in float64 on the CPU, and
    the same bits in a second call. Then times and bytes against random matrices, and for each power
    of two as `GPU_BLOCK` of `pml_regularizers/functional/sketches.py`. The first row has the value that is set.
    """
    from benchmarks.speed.cases import CASES

    tiny, device = part.tiny, part.device

    N, P, C, d, K = (2, 19, 5, 16, 3) if tiny else (40, 64, 1024, 2048, 5)
    x, gradient = torch.randn(N, P, C), torch.randn(K - 1, N, d)
    tables = [torch.empty(d, -(-C // d), dtype=torch.int32) for _ in range(K)]
    for table in tables:
        convolutions.draw_table(table, C)

    def step(checkpoint: bool, place: Device, dtype: torch.dtype) -> list[Tensor]:
        [given] = _leaves([x], place, dtype)
        here = [table.to(place) for table in tables]
        sums = convolutions.summed_convolutions(given, here, checkpoint=checkpoint)
        return [sums, *torch.autograd.grad(sums, given, gradient.to(sums))]

    expected = step(False, CPU, torch.float64)
    for title, checkpoint in KINDS.items():
        found = step(checkpoint, device, torch.float32)
        part.check(title, found, expected, FLOAT32)
        again = step(checkpoint, device, torch.float32)
        part.check(f"{title}, a second call", again, found, 0)
    for case in ("horde_sketch_stored", "horde_sketch_recomputed"):
        part.measure(CASES[case](tiny, device))
    size = f"{N} maps of {P} positions and {C} channels, {K} orders of {d}, float32"
    for title, checkpoint in KINDS.items():
        run = partial(step, checkpoint, device, torch.float32)
        measure_blocks(part, convolutions, "GPU_BLOCK", run, title, size)


# ---------------------------------------------------------------------------- losses and training


def test_losses(part: Part) -> None:
    """All losses, forward and backward.

    The losses of HORDE, joint similarity, energy confusion and VEM in float32 on given maps, with the gradients of
    head and loss. Then times of the last three.
    """
    from benchmarks.speed.cases import CASES

    tiny, device = part.tiny, part.device

    N, C, E, d = (16, 12, 8, 32) if tiny else (120, 1024, 512, 2048)
    maps = torch.randn(N, C, 4, 4)
    for name in TERMS:
        network = Objective(nn.Conv2d(C, C, 1), C, [name], E, d)
        expected = loss_and_gradients(network, maps, CPU, torch.float64)
        found = loss_and_gradients(network, maps, device, torch.float32)
        part.check(name, found, expected, FLOAT32)
    for case in ("joint_similarity", "energy_confusion", "vem"):
        part.measure(CASES[case](tiny, device))


def peak_bytes(run: Callable[[], object]) -> int:
    """The growth of the peak of torch's allocator on a GPU during a call; elsewhere `tensor_bytes`."""
    if not torch.cuda.is_available():
        return tensor_bytes(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_training_step(part: Part) -> None:
    """Training steps of both trunks.

    HORDE behind ResNet-50 and GoogLeNet: the loss and all gradients in float32, and the loss under bfloat16
    autocast. Then times of the whole step with each method, including Adam, against the step without. The memory
    is the peak of torch's allocator (`torch.cuda.max_memory_allocated`), less the memory held before.
    """
    from benchmarks.speed.cases import training_step

    tiny, device = part.tiny, part.device

    for trunk in TRUNKS:
        given = behind(trunk, tiny)
        expected = loss_and_gradients(*given, CPU, torch.float64)
        found = loss_and_gradients(*given, device, torch.float32)
        half = loss_and_gradients(*given, device, torch.float32, torch.bfloat16)
        part.check(f"{trunk}, float32, loss", found[0], expected[0], FLOAT32)
        part.check(f"{trunk}, float32, gradients", found[1:], expected[1:], 1e-2)
        part.check(f"{trunk}, bfloat16, loss", half[0], expected[0], 0.05)
    for trunk in TRUNKS:
        steps = training_step(trunk, 40, (), tiny, device)
        part.measure(replace(steps, memory=peak_bytes))


def test_float16(part: Part) -> None:
    """float16 with a scaler of gradients.

    The loss behind ResNet-50 in float16. A scale that makes gradients infinite must leave all weights as they are,
    and be halved. In later steps, at a scale of 1, the loss must fall.
    """
    tiny, device = part.tiny, part.device
    network, images = behind(TRUNKS[0], tiny)
    expected, *_ = loss_and_gradients(network, images, CPU, torch.float64)
    network, images, labels = network.to(device), images.to(device), torch.arange(16) // 4
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in parameters]

    def step() -> float:
        value: Tensor = network(images, labels.to(device), torch.float16)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return value.item()

    values = [step()]
    part.check("loss", values[0], expected, 0.05)
    part.check("weights after a skipped step", parameters, before, 0)
    part.check("scale after a skipped step", scaler.get_scale(), 2.0**59, 0)
    scaler.update(1.0)
    values += [step() for _ in range(2 if tiny else 20)]
    assert values[-1] < values[0]
    part.tell(f"Loss of the first step {values[0]:.4f}, of step {len(values)} {values[-1]:.4f}.")


# --------------------------------------------------------------------- evaluation, processes, a run


def test_retrieval(part: Part) -> None:
    """Evaluation at the size of Stanford Online Products.

    Recall@1, 10, 100, 1000, MAP@R and R-precision of 60,502 vectors of 512 by `RankAccuracyCalculator`. Expected:
    the same on the CPU, except for rare near ties, which may be decided differently.
    """
    n, width, classes = (60, 8, 12) if part.tiny else (60_502, 512, 11_316)
    labels = torch.arange(n) % classes
    vectors = F.normalize(torch.randn(classes, width)[labels] + 1.5 * torch.randn(n, width))
    recalls = (1, 10, 100, 1000)
    names = ("mean_average_precision_at_r", "r_precision", *(f"recall_at_{K}" for K in recalls))
    places = {"CPU": CPU, "device": part.device}

    def accuracy(place: Device) -> dict[str, float]:
        calculator = ours.RankAccuracyCalculator(names, device=place, recall_at=recalls)
        found: dict[str, float] = calculator.get_accuracy(vectors.to(place), labels.to(place))
        return found

    expected, found = map(accuracy, places.values())
    for name in names:
        part.check(name, found[name], expected[name], 1e-4)
    rows = {name: partial(accuracy, place) for name, place in places.items()}
    part.measure(Comparison("Time", f"{n:,} vectors of {width}", rows, rounds=1, memory=None))


@pytest.mark.slow
def test_processes(part: Part) -> None:
    """Several processes against one.

    `DistributedLoss` of all four losses in float64 under DistributedDataParallel: the loss and all gradients, with
    NCCL and one process per GPU, and with gloo and two processes, which share a GPU if there is only one. On GPUs
    also behind SyncBatchNorm. Expected: the result of one process with the whole batch.
    """
    device = part.device
    on_gpu = device.type == "cuda"
    groups = [("nccl", torch.cuda.device_count())] if on_gpu else []
    for (backend, count), norm in product([*groups, ("gloo", 2)], (False, True)[: 1 + on_gpu]):
        found, expected = (_spread(backend, n, device.type, norm) for n in (count, 1))
        name = f"{backend}, {count} process{'es' * (count > 1)}{', SyncBatchNorm' * norm}"
        part.check(name, found, expected, 1e-9)


def _spread(backend: str, count: int, device: str, norm: bool) -> list[Tensor]:
    """The loss and the gradients of the first of several processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, count, device, norm, folder)
        torch.multiprocessing.spawn(_share, arguments, nprocs=count)  # type: ignore[no-untyped-call]
        found: list[Tensor] = torch.load(f"{folder}/found.pt", map_location="cpu")
    return found


def _share(rank: int, backend: str, count: int, device: str, norm: bool, folder: str) -> None:
    """The work of one process, on its share of 48 images."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    place = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=count)
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(16) if norm else nn.Identity()
    trunk = nn.Sequential(nn.Conv2d(3, 16, 3), middle, nn.Tanh())
    network: nn.Module = Objective(trunk, 16, list(TERMS), 8, 32).to(device, torch.float64)
    if count > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        network = nn.parallel.DistributedDataParallel(network)
    images = torch.randn(48, 3, 8, 8, dtype=torch.float64).chunk(count)[rank].to(device)
    labels = (torch.arange(48) // 4).chunk(count)[rank].to(device)
    value = network(images, labels)
    value.backward()
    if rank == 0:
        found = [value.detach(), *(parameter.grad for parameter in network.parameters())]
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_glyphs(part: Part) -> None:
    """A run on Glyphs, with its table.

    `benchmarks/run.py --recipe glyphs/demo/binomial_horde`. Expected: the Recall@1 of the same run on a CPU.
    """
    from benchmarks.run import main

    tiny = part.tiny
    words = ["--recipe=glyphs/demo/binomial_horde", "--report=false"]
    if tiny:
        words += ["--data.max_classes=24", "--optimization.steps=2", "--evaluation.every=0"]
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words, f"--data.root={folder}/data", f"--output={folder}/run"]) == 0
        run = load_run(Path(folder, "run"))
    results = run.info
    if not tiny:
        part.check("Recall@1", results["metrics"]["recall_at_1"], DEMO_RECALL, 0.15)
    shown = (block for block in compare([run]).blocks if isinstance(block, Table))
    part.tell(next(shown).markdown())
    rows = [["images per second", f"{results['images_per_second']:.0f}"]]
    rows += [[f"peak memory, {k}", f"{v:.2f} GiB"] for k, v in results["peak_memory_gib"].items()]
    part.tell(Table(["the run", ""], rows).markdown())
