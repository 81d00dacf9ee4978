"""Checks against float64."""

import tempfile
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing import spawn

from speed.case import FLOAT32, Case
from speed.losses import (
    ALONE,
    LOSSES,
    TRUNKS,
    Sizes,
    draw_inputs,
    horde_behind,
    labels_of,
    loss_and_gradients,
    value_and_gradients,
)
from speed.moments import check_moments
from speed.processes import check_processes, share_batch
from speed.retrieval import Retrieval

CPU = torch.device("cpu")

HALF = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Bounds of gradients that are rounded to half precision at the end, a few units in the last place."""

SMALL = {True: Sizes(8, 9, 16, 8, 32, 3, 4), False: Sizes(32, 49, 256, 128, 512, 5, 20)}
"""Sizes; True: tiny."""

CHECKED = (
    *(ALONE, "HORDE, cascaded", "HORDE, recomputed", "HORDE, random", "HORDE, sketch"),
    *("JRS", "JRD", "energy confusion", "VEM"),
)


def check_loss(case: Case, name: str) -> None:
    """A loss in three precisions."""
    sizes = SMALL[case.tiny]
    loss, inputs = LOSSES[name](sizes), draw_inputs(sizes)
    expected = value_and_gradients(loss, inputs, CPU, torch.float64)
    found = value_and_gradients(loss, inputs, case.device, torch.float32)
    case.check(f"{name}, float32", found, expected, FLOAT32)
    for half, bound in HALF.items():
        rounded = {key: x.to(half) for key, x in inputs.items()}
        expected = value_and_gradients(loss, rounded, CPU, torch.float64)
        # The largest gradient becomes 1024: float16 then has all digits of what is not far smaller.
        largest = max(gradient.abs().max().item() for gradient in expected[1:])
        scale = 2.0 ** (10 - round(torch.tensor(largest).log2().item()))
        found = value_and_gradients(loss, rounded, case.device, torch.float32, half, scale)
        words = str(half).removeprefix("torch.")
        case.check(f"{name}, {words}, value", found[0], expected[0], FLOAT32)
        case.check(f"{name}, {words}, gradients", found[1:], expected[1:], bound)


def check_trunk(case: Case, trunk: str) -> None:
    """The paper's HORDE, and VEM's gate, behind a whole network."""
    network, images = horde_behind(trunk, case.tiny)
    expected = loss_and_gradients(network, images, case.device, torch.float64)
    found = loss_and_gradients(network, images, case.device, torch.float32)
    case.check(f"{trunk}, float32, loss", found[0], expected[0], FLOAT32)
    # Rounding lets a ReLU or a max pool pass another one of two nearly equal entries.
    case.check(f"{trunk}, float32, gradients", found[1:], expected[1:], 5e-2)
    half = loss_and_gradients(network, images, case.device, torch.float32, torch.bfloat16)
    case.check(f"{trunk}, bfloat16, loss", half[0], expected[0], 0.05)


def check_scaler(case: Case) -> None:
    network, images = horde_behind("resnet50", case.tiny)
    expected, *_ = loss_and_gradients(network, images, case.device, torch.float64)
    network, images = network.to(case.device), images.to(case.device)
    labels = labels_of(images)
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    scaler = torch.amp.GradScaler(case.device.type, init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in parameters]

    def step() -> float:
        value: Tensor = network(images, labels, torch.float16)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return value.item()

    values = [step()]
    case.check("float16, loss", values[0], expected, 0.05)
    case.check("weights after a skipped step", parameters, before, 0)
    case.check("scale after a skipped step", scaler.get_scale(), 2.0**59, 0)
    scaler.update(1024.0)
    values += [step() for _ in range(1 if case.tiny else 20)]
    case.tell(f"Loss of the first step {values[0]:.4f}, of step {len(values)} {values[-1]:.4f}.")
    assert case.tiny or values[-1] < values[0], f"the loss rose to {values[-1]:.4g}"


def check_channels_last(case: Case) -> None:
    inputs = draw_inputs(sizes := SMALL[case.tiny])
    maps = inputs["feature_map"].contiguous(memory_format=torch.channels_last)
    for name in ("HORDE, cascaded", "HORDE, sketch"):
        loss = LOSSES[name](sizes)
        expected, found = (
            value_and_gradients(loss, inputs | {"feature_map": x}, case.device, torch.float32)
            for x in (inputs["feature_map"], maps)
        )
        case.check(f"{name}, channels_last", found, expected, FLOAT32)


def correctness(case: Case) -> None:
    """Losses, moments, ranks and processes against float64.

    Every loss with the gradients of its inputs and parameters: in float32, and under autocast on inputs in bfloat16
    and float16, whose gradients pass through a scale as a `GradScaler`'s; the float64 is the CPU's. HORDE's moments
    at the paper's size, and whole networks: against plain autograd in float64 on the GPU. TF32 is off, except where
    a line says TF32. Ranks: against sorted distances in float64. Two processes that share the GPU by gloo, and one
    with NCCL: against one process with the whole batch, all in float64.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Early, since importing takes seconds.
        processes = spawn(share_batch, (case.device.type, folder), nprocs=2, join=False)
        for name in CHECKED:
            case.run(name, 3, partial(check_loss, case, name))
        for kind in ("trained", "random", "sketched"):
            case.run(f"{kind} moments", 8, partial(check_moments, case, kind))
        case.run("ranks", 4, lambda: Retrieval(case, 3000, 400, 64).check(1e-6, (1, 10, 50)))
        for trunk in TRUNKS[: 1 if case.tiny else 2]:
            case.run(trunk, 8, partial(check_trunk, case, trunk))
        case.run("processes", 0, partial(check_processes, case, processes, folder))


def float16(case: Case) -> None:
    """float16 with a scaler, and channels_last.

    The loss of HORDE behind ResNet-50 in float16, against float64 on the GPU. A scale that makes gradients infinite
    must leave all weights as they are, and be halved; in later steps, at a scale of 1024, the loss must fall. Maps
    in channels_last must give HORDE the value and the gradients of contiguous ones.
    """
    case.run("float16 with a scaler", 8, partial(check_scaler, case))
    case.run("channels_last", 3, partial(check_channels_last, case))
