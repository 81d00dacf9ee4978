"""Training steps with each method."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.building.frozen_stages import FrozenStages
from speed.case import Case
from speed.floors import FLOORS, measure_rates
from speed.losses import ALONE, LOSSES, TRUNKS, Sizes, labels_of, make_trunk, with_method
from speed.measuring import matmul_precision, peak_bytes
from speed.moments import compare_blocks

LABELS = {
    ALONE: "binomial deviance alone",
    "JRD": "JRD instead",
    "JRS": "JRS of pooled features and embeddings",
}

FEW = (ALONE, "HORDE, cascaded", "HORDE, sketch", "HORDE, sketch of d / 4")
ALL = [name for name in LOSSES if name != "JRD" and "matmul_dtype" not in name]
"""Methods that are compared on a CPU: some with their memory, or all."""

CALLS = 4
"""Steps that are timed at once on a GPU, without a wait between them."""

PHOTOGRAPHS: dict[str, Any] = {"trunk": "tf_efficientnet_lite0", "N": 32, "side": 128, "E": 128}
PHOTOGRAPHS |= {"d": 1024, "K": 3, "frozen": 6}
"""As the recipes photographs/frozen train; by default steps have the sizes of HORDE's paper."""


class Steps:
    """Forward, backward and Adam behind one trunk on one batch, with 4 images per class, for each method added.

    With frozen stages, whose outputs are kept, and on a GPU, the network runs in bfloat16; on a GPU also in
    channels_last, with the fused Adam and products in TF32.
    """

    def __init__(
        self,
        case: Case,
        trunk: str,
        N: int,
        *,
        side: int = 256,
        E: int = 512,
        d: int = 8192,
        K: int = 5,
        frozen: int = 0,
    ) -> None:
        if case.tiny:
            N, side, E, d, K, frozen = 4, 32, 8, 64, 3, min(1, frozen)
        self.case, self.on_gpu = case, case.device.type == "cuda"
        self.half = torch.bfloat16 if self.on_gpu or frozen else None
        layout = torch.channels_last if self.on_gpu else torch.contiguous_format
        self.trunk = make_trunk(trunk, case.tiny).to(case.device, memory_format=layout)
        images = torch.randn(N, 3, side, side, device=case.device)
        self.images = images.contiguous(memory_format=layout)
        self.size = f"{N} images of {side} px"
        if frozen:
            stages = FrozenStages(self.trunk, frozen, self.images)
            self.images = stages.lower(self.images).to(torch.bfloat16)
            self.trunk.forward = stages.upper
            self.size += f", {frozen} frozen stages, their outputs kept"
        with torch.no_grad(), self.autocast():
            P = self.trunk(self.images)[0, 0].numel()
        self.sizes = Sizes(N, P, self.trunk.num_features, E, d, K, 100)
        precision = "trunk in bfloat16" if self.half else "float32"
        precision += ", moments in TF32" * self.on_gpu
        self.size += f", HORDE with K = {K} and d = {d:,}, {precision}"
        self.runs: dict[str, Callable[[], None]] = {}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.images.device.type, self.half, enabled=self.half is not None)

    def add(self, name: str) -> None:
        """Make the network and the optimizer of a method, and take a step."""
        with self.images.device:  # drawing the paper's matrices on the CPU takes seconds
            network = with_method(self.trunk, self.sizes, name)
        network = network.to(self.images.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-6, fused=self.on_gpu)
        labels = labels_of(self.images)

        def step() -> None:
            network(self.images, labels, self.half).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes Adam's state, lets cuDNN choose
        self.runs[LABELS.get(name, name)] = step


def compare(steps: Steps, title: str, names: Iterable[str], **options: Any) -> None:
    """Steps with the metric loss alone, against steps with each method."""
    case = steps.case
    with matmul_precision("high" if steps.on_gpu else "highest"):
        for name in names:
            case.run(f"{title}, {name}", 0, partial(steps.add, name))
        case.compare(title, steps.size, steps.runs, **options)


def methods(case: Case, *, trunk: str, N: int = 8, frozen: int = 0, **sizes: int) -> None:
    """Training steps with each method."""
    steps = Steps(case, trunk, N, frozen=frozen, **sizes)
    title = f"A training step of {trunk} with each method"
    compare(steps, title, ALL, rounds=25 if frozen else 3, memory=None)  # short steps vary more


def horde_steps(case: Case, *, trunk: str) -> None:
    """Time and memory of training steps with HORDE."""
    compare(Steps(case, trunk, 40), f"A training step of {trunk}", FEW, rounds=3)


def steps(case: Case) -> None:
    """Whole training steps with each method.

    A step is the forward and backward pass of ResNet-50 or GoogLeNet at 256 px, a head of 512 and a loss, and fused
    Adam, under autocast to bfloat16, in channels_last; products in float32 run in TF32. HORDE's default are
    sketches of orders 2 and 3 with d = 1024; random and cascaded ones have the paper's K = 5 and d = 8192. Extra is
    what a step takes longer than with binomial deviance alone. The floor is the time that its added matrix products
    and passes over memory take at the rates of this card, which the first table gives; `speed/floors.py` counts
    them. Launches of kernels are not in the floor: what adds next to no work still has to launch. Memory is the
    growth of the peak of torch's allocator in a step.
    """

    def measure(trunk: str, N: int, title: str) -> None:
        steps = Steps(case, trunk, N)
        floors = {
            LABELS.get(name, name): sum(n * seconds[kind] for kind, n in work(steps.sizes).items())
            for name, work in FLOORS.items()
        }
        options = {"rounds": 5, "memory": peak_bytes, "floors": floors, "calls": CALLS}
        compare(steps, title, FLOORS, **options)

    seconds = measure_rates(case)
    benchmark = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False)
    with benchmark, matmul_precision("high"):  # as in a training that shall be fast
        for N, least in ((40, 14), (112, 18))[: 1 if case.tiny else 2]:
            for trunk in TRUNKS[: 1 if case.tiny else 2]:
                title = f"{trunk}, {N} images"
                case.run(title, least, partial(measure, trunk, N, title))
        case.run("block sizes", 8, partial(compare_blocks, case))
