"""Evaluate one model on several datasets and save the results of this process of a pool.

`save` writes FOLDER/CASE.RANK.pt, a dict of the fields of `Evaluation`, for every case of `CASES`, and
FOLDER/notes.RANK.json: how many queries the process ranked, and how the kernel counts the memory of large
tensors. Three processes do the same once more under each name of `HOSTS`, in folders of these names.
"""

import json
import re
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from benchmarks.evaluation import shared_tensors
from benchmarks.evaluation.tester import evaluate, rank_calculator
from pml_regularizers import _ranks as ranks
from tests.benchmarks.runs import as_accelerator
from tests.support.pool import Processes


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


# Name: dataset, batch size, type, queries. Uneven shares, a last partial batch, processes without a batch.
CASES = {
    "seven": (Images(7), 4, torch.float32, None),
    "two": (Images(2), 4, torch.float32, None),
    "subset": (Subset(Images(90), list(range(70, 20, -1))), 4, torch.float32, None),
    "float64": (Images(23), 2, torch.float64, None),
    "gallery": (Images(60), 7, torch.float32, torch.arange(60) % 2 == 0),
}
# Where three processes believe to be; nowhere: where nothing can be shared.
HOSTS = {"two hosts": ("a", "a", "b"), "nowhere": ("", "", "")}
WIDE = 8192


def memory(tensor: Tensor) -> dict[str, Any]:
    """Bytes of the tensor, and the kernel's count of the mapping that it lies in."""
    found: dict[str, Any] = {"bytes": tensor.nbytes}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+)(?: \S+){4} *(.*)", line):
            inside = int(header[1], 16) <= tensor.data_ptr() < int(header[2], 16)
            if inside:
                found["file"] = header[3]
        elif inside and (count := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            found[count[1]] = int(count[2]) * 1024
    return found


def save(processes: Processes, folder: Path) -> None:
    accelerator = as_accelerator(processes)
    with mock.patch.object(ranks, "BLOCK_ROWS", 7):
        save_all(accelerator, folder)
        for place, names in HOSTS.items() if processes.num_processes == 3 else ():
            name = partial(names.__getitem__, processes.process_index)
            with mock.patch.object(shared_tensors, "host", name):
                save_all(accelerator, folder / place)


def save_all(accelerator: Accelerator, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ranked: Counter[str] = Counter()
    measured = ranks._measured
    for name, (dataset, batch_size, dtype, is_query) in CASES.items():

        def counted(distances: Tensor, *right: Any, case: str = name) -> Tensor:
            ranked[case] += len(distances)
            return measured(distances, *right)

        ranks._measured = counted
        found = evaluate(
            accelerator,
            accelerator.prepare(build_model().to(dtype)),
            dataset,
            rank_calculator(accelerator, (1, 2, 4, 8)),
            batch_size=batch_size,
            is_query=is_query,
            extract=lambda embeddings: embeddings.pow(2)[:, :4],
            progress=False,
            dtype=dtype,
        )
        torch.save(asdict(found), folder / f"{name}.{accelerator.process_index}.pt")
    ranks._measured = measured
    notes = {"ranked": ranked["subset"], **large(accelerator)}
    (folder / f"notes.{accelerator.process_index}.json").write_text(json.dumps(notes))


def large(accelerator: Accelerator) -> dict[str, Any]:
    """The memory of 64 embeddings of 32 KB, and of what they are ranked by, while all processes hold them."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, WIDE))
    torch.nn.init.normal_(model[1].weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(model[1].bias)
    before = set(Path("/proc/self/fd").iterdir())
    rows: list[Tensor] = []
    prepared = ranks._prepared
    ranks._prepared = lambda *args: rows.append(prepared(*args)) or rows[-1]
    calculator = rank_calculator(accelerator, (1,))
    found = evaluate(accelerator, model, Images(64), calculator, batch_size=5, progress=False)
    ranks._prepared = prepared
    opened = [str(path) for path in Path("/proc/self/fd").iterdir() if path not in before]
    for tensor in (found.embeddings, *rows):
        tensor.sum()  # every process has seen every page
    accelerator.wait_for_everyone()
    notes = {
        "embeddings": memory(found.embeddings),
        "prepared": memory(rows[0]),
        "opened": [path for path in opened if Path(path).exists()],
    }
    accelerator.wait_for_everyone()
    return notes
