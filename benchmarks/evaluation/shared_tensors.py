"""Tensors in shared memory: one copy on a host, for any number of processes.

A tensor lies in an anonymous file in memory (Linux: memfd_create(2)), which the other processes open through the
one that made it. No file name can be left behind, and the memory is freed when the last process drops the tensor
or ends, in any way. On systems without such files every process has its own copy.

Call all functions on all processes.
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor


def host() -> str:
    """A name shared only by processes that see each other in /proc; empty if there is no /proc."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def leaders(accelerator: Accelerator) -> list[int]:
    """For each process, the first process on its host, which writes what all of them share."""
    hosts = gather_object([host() or f"process {accelerator.process_index}"])
    return [hosts.index(name) for name in hosts]


def shared_tensor(accelerator: Accelerator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make an uninitialised tensor on the CPU, the same one for all processes of a host.

    If every process is alone on its host, it is a plain tensor.
    """
    first = leaders(accelerator)
    if len(set(first)) == len(first):
        return torch.empty(*shape, dtype=dtype)
    leader, handle = first[accelerator.process_index], None
    if leader == accelerator.process_index:
        handle = os.memfd_create("shared_tensor")
    try:
        paths = gather_object([f"/proc/{os.getpid()}/fd/{handle}"])
        # The first process sets the file's size.
        flat = torch.from_file(paths[leader], shared=True, size=prod(shape), dtype=dtype)
        accelerator.wait_for_everyone()
    finally:
        if handle is not None:
            os.close(handle)
    return flat.view(*shape)


def allocate(
    accelerator: Accelerator, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """Return a `shared_tensor`, and True if this process is the one on its host that must fill it."""
    first = leaders(accelerator)[accelerator.process_index]
    return shared_tensor(accelerator, shape, dtype), first == accelerator.process_index


def exchange(accelerator: Accelerator, tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """Complete a shared tensor whose parts were written by different processes, on one host or several.

    Args:
        tensor: (n, ...), made by `shared_tensor`.
        parts: The rows of each part. Part i was written by process i modulo the number of processes.
    """
    first = leaders(accelerator)
    me, others = accelerator.process_index, len(set(first)) > 1
    for i, rows in enumerate(parts if others else ()):
        source = i % accelerator.num_processes
        sent = broadcast(tensor[rows].to(accelerator.device), from_process=source)
        if first[me] == me != first[source]:
            tensor[rows] = sent.to(tensor.device)
    accelerator.wait_for_everyone()
