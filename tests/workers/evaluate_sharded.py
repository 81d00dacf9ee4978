"""Evaluate one model on several datasets and save what this process found.

    torchrun --nproc_per_node N tests/workers/evaluate_sharded.py N FOLDER

writes FOLDER/CASE.RANK.pt, a dict of the fields of `Evaluation`, for every case of `CASES`.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from benchmarks.evaluation import evaluate


class Images(Dataset):
    """`n` images of noise around a pattern of their class; image i has class i // 2."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int, int]:
        if not isinstance(i, int):
            raise TypeError(f"key: expected an int, got {i!r}")
        noise, pattern = (
            torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed))
            for seed in (i, 1000 + i // 2)
        )
        return noise + 0.5 * pattern, i // 2, i


def build_model() -> nn.Module:
    """A small network with buffers, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.Linear(288, 6)
        )
        model[1].running_mean.normal_()
    return model


# Name: dataset, batch size, type. Uneven shares, a last partial batch, processes without a batch.
CASES = {
    "seven": (Images(7), 4, torch.float32),
    "two": (Images(2), 4, torch.float32),
    "subset": (Subset(Images(90), list(range(70, 20, -1))), 4, torch.float32),
    "float64": (Images(23), 2, torch.float64),
}


def main(world_size: int, folder: Path) -> None:
    accelerator = Accelerator()
    if accelerator.num_processes != world_size:
        raise RuntimeError(f"expected {world_size} processes, got {accelerator.num_processes}")
    for name, (dataset, batch_size, dtype) in CASES.items():
        found = evaluate(
            accelerator,
            accelerator.prepare(build_model().to(dtype)),
            dataset,
            batch_size=batch_size,
            extract=lambda embeddings: embeddings.pow(2)[:, :4],
            progress=False,
            dtype=dtype,
        )
        torch.save(asdict(found), folder / f"{name}.{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
