"""The parts of `python -m benchmarks.speed.gpu`: what each checks, and what it measures.

A part is a function of a flag, for tiny sizes, and of a device. It yields a `Check` for every number that was right
and Markdown for what was measured.
"""

import copy
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.reporting import Table
from benchmarks.speed.measuring import Comparison, measure, peak_bytes, tensor_bytes
from pml_regularizers import summed_products as products

Device = torch.device
PARTS: dict[str, Callable[[bool, Device], Iterator["Check | str"]]] = {}

FLOAT32, TF32, BFLOAT16 = 1e-4, 2**-8, 2**-6
"""Bounds of errors: TF32 rounds to 10 bits, bfloat16 to 7; five orders multiply that, a mean divides it."""


class Check(NamedTuple):
    """A right number: its name, its error and the bound of it, in print."""

    name: str
    error: str
    bound: str


class WrongNumberError(Exception):
    """Which number, what it is, and what it should be."""


def part(function: Any) -> Any:
    PARTS[function.__name__] = function
    return function


def check(name: str, found: Any, expected: Any, bound: float) -> Check:
    """The largest error of a number, a tensor or several.

    Raises:
        WrongNumberError: if it exceeds the bound times the largest expected entry, or is not finite.
    """
    largest = 0.0
    found, expected = (x if isinstance(x, list | tuple) else [x] for x in (found, expected))
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        a, b = (torch.as_tensor(x).detach().cpu().double().flatten() for x in (a, b))
        scale = b.abs().max().item()
        errors = (a - b).abs().nan_to_num(torch.inf)
        worst = int(errors.argmax())
        largest = max(largest, errors[worst].item() / scale if scale else torch.inf)
        if largest > bound:
            raise WrongNumberError(
                f"{name}: tensor {index + 1} of {len(found)}, entry {worst}: got {a[worst]:.6g}, expected "
                f"{b[worst]:.6g} to {bound:.1e} of {scale:.3g}"
            )
    return Check(name, f"{largest:.1e}", f"{bound:.1e}")


def _table(comparison: Comparison, tiny: bool) -> str:
    return f"### {comparison.name}\n\n{comparison.table(measure(comparison, tiny=tiny))}"


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """In matrix products and convolutions."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


# ------------------------------------------------------------------------------------------ HORDE


@part
def kernels(tiny: bool, device: Device) -> Iterator[Check | str]:
    """The Triton kernels.

    The sums of products of all orders, or of the last, and their gradients, by the kernels of
    `pml_regularizers/triton_products.py`; expected: the equations in float64.
    """
    N, P, C, d, K = (2, 19, 16, 70, 4) if tiny else (16, 49, 1024, 1000, 5)
    x, matrices, weights = _products_case(N, P, C, d, K)
    kinds = {
        "float64": (torch.float64, False, 1e-11),
        "float32": (torch.float32, False, FLOAT32),
        "TF32": (torch.float32, True, TF32),
        "bfloat16": (torch.bfloat16, False, BFLOAT16),
    }
    for first in (2, K):
        phi = torch.stack([x @ matrix for matrix in matrices]).cumprod(dim=0)
        sums = phi[first - 1 :].sum(dim=2)
        expected = [
            sums,
            *torch.autograd.grad(sums, [x, *matrices], weights[first - 2 :]),
        ]
        for (name, (dtype, tf32, bound)), activations in itertools.product(
            kinds.items(), ("store", "recompute")
        ):
            kind = dtype if dtype == torch.float64 else torch.float32
            inputs = [t.detach().to(device, kind).requires_grad_() for t in (x, *matrices)]
            with _tf32(tf32):
                found = products.summed_products(
                    *(inputs[0], inputs[1:]),
                    **{"first": first, "dtype": dtype, "activations": activations},
                    kernels="triton",
                )
                gradients = torch.autograd.grad(found, inputs, weights[first - 2 :].to(found))
            orders = f"orders {first} to {K}" if first < K else f"order {K}"
            yield check(f"{orders}, {activations}, {name}", [found, *gradients], expected, bound)


def _products_case(N: int, P: int, C: int, d: int, K: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Features, matrices and the gradients of orders 2 to K, in float64."""
    x = torch.randn(N, P, C, dtype=torch.float64, requires_grad=True)
    matrices = [
        (torch.randn(C, d, dtype=torch.float64) / C**0.5).requires_grad_() for _ in range(K)
    ]
    return x, matrices, torch.randn(K - 1, N, d, dtype=torch.float64)


@part
def blocks(tiny: bool, device: Device) -> Iterator[Check | str]:
    """Widths of blocks.

    HORDE's sums at the paper's size, stored with `GPU_BLOCK` and recomputed with `BLOCK` of
    `pml_regularizers/summed_products.py` at each power of two; expected: the same by plain autograd in float32.
    The first row of each table has the width that is set.
    """
    N, P, C, d, K = (2, 19, 5, 300, 3) if tiny else (40, 64, 1024, 8192, 5)
    x, matrices, weights = _products_case(N, P, C, d, K)
    inputs = [t.detach().to(device, torch.float32).requires_grad_() for t in (x, *matrices)]
    gradient = weights.to(device, torch.float32)

    def step(activations: str, name: str = "BLOCK", block: int = 0) -> list[Tensor]:
        before = getattr(products, name)
        setattr(products, name, block or before)
        try:
            sums = products.summed_products(inputs[0], inputs[1:], activations=activations)  # type: ignore[arg-type]
            return [sums, *torch.autograd.grad(sums, inputs, gradient)]
        finally:
            setattr(products, name, before)

    powers = (8, 10) if tiny else range(18, 27)
    with _tf32(False):
        expected = [tensor.cpu() for tensor in step("autograd")]
        for activations, name in (("store", "GPU_BLOCK"), ("recompute", "BLOCK")):
            widths = [getattr(products, name), *(2**power for power in powers)]
            steps = {block: partial(step, activations, name, block) for block in widths}
            for block, run in steps.items():
                yield check(f"{activations}, {name} = {block:,}", run(), expected, FLOAT32)
            size = f"{N} maps of {P} positions and {C} channels, {K} orders of {d}, float32"
            rows = {f"{block:,}": run for block, run in steps.items()}
            yield _table(
                Comparison(f"{activations}, {name}", size, rows, memory_against=next(iter(rows))),
                tiny,
            )


@part
def moments(tiny: bool, device: Device) -> Iterator[Check | str]:
    """HORDE's moments against matrix products alone.

    Times and bytes of all ways through the moments; the targets are those of a GPU.
    """
    from benchmarks.speed import cases

    yield _table(cases.horde_moments(tiny, device), tiny)


# ---------------------------------------------------------------------------- losses and training


@part
def losses(tiny: bool, device: Device) -> Iterator[Check | str]:
    """All losses, forward and backward.

    HORDE, joint similarity, energy confusion and VEM in float32, their values and all gradients.
    """
    N, C, E, d = (16, 12, 8, 32) if tiny else (120, 1024, 512, 2048)
    labels = torch.arange(N) // 4
    inputs = {
        "embeddings": torch.randn(N, E, dtype=torch.float64),
        "pooled": torch.randn(N, C, dtype=torch.float64),
        "maps": torch.randn(N, C, 4, 4, dtype=torch.float64),
    }
    kernel = ours.GaussianMixtureKernel
    joint = ours.JRSRegularizer({"pooled": kernel(), "embeddings": kernel(normalize=True)})
    cases: dict[str, tuple[nn.Module, list[str], Callable[..., Tensor]]] = {
        "HORDE": (
            ours.HORDELoss(ours.BinomialDevianceLoss(), C, E, moment_dim=d),
            ["embeddings", "maps"],
            lambda loss, labels, e, maps: loss(e, labels, features=maps),
        ),
        "JRS": (
            joint,
            ["embeddings", "pooled"],
            lambda loss, labels, e, pooled: loss(e, labels, features={"pooled": pooled}),
        ),
        "energy confusion": (
            ours.EnergyConfusionRegularizer(gradient="all"),
            ["embeddings"],
            lambda loss, labels, e: loss(e, labels),
        ),
        "VEM": (
            nn.ModuleList([ours.VEMAttention(C), ours.VarianceRegularizer()]),
            ["pooled"],
            lambda both, labels, pooled: (
                both[1](both[0](pooled), features=(pooled, both[0].variance))
                + both[0](pooled).square().mean()
            ),
        ),
    }

    def measured(name: str, device: Device, dtype: torch.dtype) -> list[Tensor]:
        loss, read, call = cases[name]
        loss = copy.deepcopy(loss).to(device, dtype)
        given = [inputs[key].to(device, dtype).requires_grad_() for key in read]
        value = call(loss, labels.to(device), *given)
        return [value, *torch.autograd.grad(value, [*given, *loss.parameters()])]

    with _tf32(False):
        for name in cases:
            expected = measured(name, Device("cpu"), torch.float64)
            yield check(name, measured(name, device, torch.float32), expected, FLOAT32)
    from benchmarks.speed import cases as timed

    for case in (timed.joint_similarity, timed.energy_confusion, timed.vem):
        yield _table(case(tiny, device), tiny)


TRUNKS = ("resnet50", "googlenet")


def _network(trunk: str, tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """A trunk, a head and HORDE as one module that returns its loss, images and labels."""
    import timm

    from benchmarks.backbones import register

    register()
    name, side, d = ("test_resnet", 32, 32) if tiny else (trunk, 128, 512)
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=0, global_pool="")
    return _Trained(network, d), torch.randn(16, 3, side, side), torch.arange(16) // 4


class _Trained(nn.Module):
    """Returns a loss in the precision of its parameters, behind a network in that of autocast."""

    def __init__(self, trunk: nn.Module, d: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ours.EmbeddingHead.for_trunk(trunk, 64)
        base = ours.BinomialDevianceLoss()
        self.loss = ours.HORDELoss(base, self.head.in_channels, 64, moment_dim=d)
        self.loss.attach(self.head)

    def forward(self, images: Tensor, labels: Tensor, half: torch.dtype | None = None) -> Tensor:
        with torch.autocast(images.device.type, half, enabled=half is not None):
            embeddings = self.head(self.trunk(images))
        value: Tensor = self.loss(embeddings, labels)
        return value


@part
def training_step(tiny: bool, device: Device) -> Iterator[Check | str]:
    """Training steps of both trunks.

    The loss with HORDE and the gradients of head and loss behind ResNet-50 and GoogLeNet, in float32 and with bfloat16
    autocast; then the whole step, Adam included, against the step without HORDE.
    """
    from benchmarks.speed import cases

    for trunk in TRUNKS:
        network, images, labels = _network(trunk, tiny)

        def step(
            device: Device, dtype: torch.dtype, half: torch.dtype | None, given: Any
        ) -> tuple[Tensor, list[Tensor]]:
            network, images, labels = given
            network = copy.deepcopy(network).to(device, dtype)
            value = network(images.to(device, dtype), labels.to(device), half)
            parameters = [*network.head.parameters(), *network.loss.parameters()]
            return value, list(torch.autograd.grad(value, parameters))

        given = network, images, labels
        with _tf32(False):
            value, gradients = step(Device("cpu"), torch.float64, None, given)
            found = step(device, torch.float32, None, given)
            yield check(f"{trunk}, float32, loss", found[0], value, FLOAT32)
            yield check(f"{trunk}, float32, gradients", found[1], gradients, 1e-2)
            found = step(device, torch.float32, torch.bfloat16, given)
            yield check(f"{trunk}, bfloat16, loss", found[0], value, 0.05)
    for case in (cases.horde_resnet50, cases.horde_googlenet):
        yield _table(case(tiny, device), tiny)


@part
def float16(tiny: bool, device: Device) -> Iterator[Check | str]:
    """float16 with a scaler of gradients.

    Behind ResNet-50 in float16: the loss; that a scale which makes gradients infinite leaves all weights as they
    are and is halved; and that the loss falls in later steps, at a scale of 1.
    """
    network, images, labels = _network(TRUNKS[0], tiny)
    expected = copy.deepcopy(network).double()(images.double(), labels)
    network, images, labels = network.to(device), images.to(device), labels.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**60)
    values: list[Tensor] = []

    def step() -> None:
        value = network(images, labels, torch.float16)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values.append(value.detach())

    before = [parameter.detach().clone() for parameter in network.parameters()]
    step()
    yield check("loss", values[0], expected, 0.05)
    moved = [(p - q).abs().max() for p, q in zip(network.parameters(), before, strict=True)]
    yield check("weights moved after a skipped step, plus 1", 1 + max(moved), 1.0, 0)
    yield check("scale after a skipped step", scaler.get_scale(), 2.0**59, 0)
    scaler.update(1.0)
    for _ in range(2 if tiny else 20):
        step()
    first, last = values[0].item(), values[-1].item()
    if not last < first:
        raise WrongNumberError(
            f"loss after {len(values)} steps: got {last}, expected below {first}"
        )
    yield f"Loss of the first step {first:.4f}, of step {len(values)} {last:.4f}."


@part
def memory(tiny: bool, device: Device) -> Iterator[Check | str]:
    """Peak memory.

    The most that torch's allocator holds on the device in a training step (`torch.cuda.max_memory_allocated`) beyond
    what it held before, beside the sum that `tensor_bytes` counts, which leaves out workspaces and results.
    """
    from benchmarks.speed.steps import network_steps

    for trunk in TRUNKS:
        comparison = network_steps(trunk, 40, tiny, device)
        rows = [
            [name, *(f"{count(run) / 1e6:,.1f}" for count in (peak_bytes, tensor_bytes))]
            for name, run in comparison.candidates.items()
        ]
        header = ["", "allocator (MB)", "counted (MB)"]
        yield f"### {comparison.name}, bytes\n\n{comparison.size}.\n\n{Table(header, rows).markdown()}"


# ------------------------------------------------------------------- evaluation, processes, runner


@part
def retrieval(tiny: bool, device: Device) -> Iterator[Check | str]:
    """Evaluation at the size of Stanford Online Products.

    Recall@1, 10, 100, 1000, MAP@R and R-precision of 60,502 vectors of 512 by `RankAccuracyCalculator`; expected: the same
    on the CPU, where near ties may fall the other way.
    """
    n, width, classes = (60, 8, 12) if tiny else (60_502, 512, 11_316)
    labels = torch.arange(n) % classes
    vectors = F.normalize(torch.randn(classes, width)[labels] + 1.5 * torch.randn(n, width))
    recalls = (1, 10, 100, 1000)
    names = ("mean_average_precision_at_r", "r_precision", *(f"recall_at_{K}" for K in recalls))
    results: dict[str, dict[str, float]] = {}

    def accuracy(name: str, place: Device) -> None:
        calculator = ours.RankAccuracyCalculator(names, device=place, recall_at=recalls)
        results[name] = calculator.get_accuracy(vectors.to(place), labels.to(place))

    there = "GPU" if device.type == "cuda" else "the same"
    places = {"CPU": Device("cpu"), there: device}
    rows = {name: partial(accuracy, name, place) for name, place in places.items()}
    with _tf32(False):
        table = _table(Comparison("Time", f"{n:,} vectors of {width}", rows, rounds=1), tiny)
    for name in names:
        yield check(name, results[there][name], results["CPU"][name], 1e-4)
    yield table


@part
def processes(tiny: bool, device: Device) -> Iterator[Check | str]:
    """Several processes against one.

    `DistributedLoss` of HORDE, energy confusion, joint similarity and VEM in float64 under DistributedDataParallel: the loss
    and all gradients with NCCL and a process per GPU, and with gloo and two processes, on one GPU if there is no
    other; behind SyncBatchNorm on GPUs. Expected: one process with the whole batch.
    """
    groups = [("nccl", torch.cuda.device_count())] if device.type == "cuda" else []
    for backend, count in [*groups, ("gloo", 2)]:
        for norm in (False, True) if device.type == "cuda" else (False,):
            found, expected = (
                _spread(*how, device.type, norm) for how in ((backend, count), (backend, 1))
            )
            name = f"{backend}, {count} process{'es' * (count > 1)}{', SyncBatchNorm' * norm}"
            yield check(name, found, expected, 1e-9)


def _spread(backend: str, count: int, device: str, norm: bool) -> list[Tensor]:
    """The loss and the gradients that the first of some processes finds."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, count, device, norm, folder)
        torch.multiprocessing.spawn(_share, arguments, nprocs=count)  # type: ignore[no-untyped-call]
        found: list[Tensor] = torch.load(Path(folder) / "found.pt", map_location="cpu")
    return found


def _share(rank: int, backend: str, count: int, device: str, norm: bool, folder: str) -> None:
    """What each process does with its share of 48 images."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    place = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=count)
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16) if norm else nn.Identity(), nn.Tanh()
    )
    head = ours.EmbeddingHead(16, 8, attention=ours.VEMAttention)
    loss = ours.ScheduledLosses(
        {
            "horde": ours.HORDELoss(ours.BinomialDevianceLoss(), 16, 8, order=3, moment_dim=32),
            "variance": ours.VarianceRegularizer(),
            "confusion": ours.EnergyConfusionRegularizer(),
            "joint": ours.JRSRegularizer(),
        },
        weights={"horde": 1.0, "variance": 0.5, "confusion": 0.3, "joint": 2.0},
    )
    ours.attach_all(loss, head)
    network: nn.Module = nn.Sequential(trunk, head).to(device, torch.float64)
    images = torch.randn(48, 3, 8, 8, dtype=torch.float64).chunk(count)[rank].to(device)
    labels = (torch.arange(48) // 4).chunk(count)[rank].to(device)
    criterion = ours.prepare_loss(ours.DistributedLoss(loss.to(device, torch.float64)))
    if count > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        network = nn.parallel.DistributedDataParallel(network)
    value = criterion(network(images), labels)
    value.backward()
    if rank == 0:
        gradients = [parameter.grad for parameter in (*network.parameters(), *loss.parameters())]
        torch.save([value.detach(), *gradients], Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


@part
def glyphs(tiny: bool, device: Device) -> Iterator[Check | str]:
    """A run on Glyphs, to its table.

    `benchmarks/run.py --recipe glyphs/demo/binomial_horde`; expected: the Recall@1 of the same run on a CPU.
    """
    from benchmarks.run import main

    less = ("--data.max_classes=24", "--optimization.steps=2", "--evaluation.every=0")
    with tempfile.TemporaryDirectory() as folder:
        said = _printed(
            main,
            *(
                "--recipe=glyphs/demo/binomial_horde",
                f"--data.root={folder}/data",
                "--report=false",
            ),
            *(f"--output={folder}/run", *(less if tiny else ())),
        )
        results = json.loads((Path(folder) / "run" / "run.json").read_text())
    if not tiny:
        yield check("Recall@1", results["metrics"]["recall_at_1"], DEMO_RECALL, 0.15)
    yield "\n".join(line for line in said.splitlines() if line.startswith("|"))
    rows = [["images per second", f"{results['images_per_second']:.0f}"]]
    rows += [[f"peak memory, {k}", f"{v:.2f} GiB"] for k, v in results["peak_memory_gib"].items()]
    yield Table(["the run", ""], rows).markdown()


DEMO_RECALL = 0.2284


@part
def runner(tiny: bool, device: Device) -> Iterator[Check | str]:
    """Images per second of the runner.

    `python -m benchmarks.speed.loop` on generated photographs with data-loader workers, in bfloat16: beside a loop in
    plain torch over the same batches.
    """
    from benchmarks.speed.loop import main

    some = ["--synthetic=4000", "--recipe=images/resnet50/binomial", "--precision=bf16"]
    if tiny:
        less = ["--rounds=1", "--steps=1", "--data.image_size=32", "--data.num_workers=0"]
        less += ["--data.batch_size=8", "--data.samples_per_class=4", "--data.max_classes=4"]
        some = ["--synthetic=160", some[1], *less]
    said = _printed(main, *some, "--model.trunk_args={}")
    rows = [(re.split(r"\s{2,}", line) + ["", ""])[:3] for line in said.splitlines()]
    yield Table(["", "", "of it"], rows).markdown()


def _printed(main: Callable[[Sequence[str]], int], *words: str) -> str:
    """What a command prints.

    Raises:
        RuntimeError: unless it succeeds.
    """
    with redirect_stdout(StringIO()) as output:
        if status := main(words):
            raise RuntimeError(f"status {status} of {' '.join(words)}")
    return output.getvalue()
