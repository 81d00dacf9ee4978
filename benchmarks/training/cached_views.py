"""The outputs of a trunk's frozen stages for a few fixed views of each training image, kept in a file.

View v of image i is a function of the run's seed, v and i. A step draws one of an image's views by the seed that
the sampler gives it, so that a step stays a function of the seed and its number.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.building import EmbeddingModel
from benchmarks.console import alone, ignore_signals, progress_bar
from benchmarks.datasets import Glyphs, ImageSet
from benchmarks.settings import ConfigError, Experiment, num_workers

BATCH = 64  # images at a time: fixed, so that no output depends on the number of processes

_STORED = {torch.bfloat16: torch.int16}  # numpy has no bfloat16


class CachedViews(Dataset[tuple[Tensor, int, int]]):
    """Training images as the kept outputs of the frozen stages.

    Args:
        path: Folder that `cache_views` made.
        labels: (n,) int64, the class of each image.

    Shape:
        `dataset[i, seed]` is (output, label, index); output without its batch dimension, as the stages gave it.
    """

    def __init__(self, path: Path, labels: Tensor) -> None:
        about = json.loads((path / "about.json").read_text())
        self.labels = labels
        self._outputs = np.load(path / "outputs.npy", mmap_mode="r")
        self._dtype = getattr(torch, about["dtype"])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int]:
        index, seed = key
        output = torch.from_numpy(self._outputs[index, seed % self._outputs.shape[1]].copy())
        return output.view(self._dtype), int(self.labels[index]), index


def cache_views(
    accelerator: Accelerator, model: Any, dataset: Glyphs | ImageSet, experiment: Experiment
) -> CachedViews:
    """Run the frozen stages once for all views of the training images, unless a run with the same ones did.

    One process computes, others that need the same outputs wait for it.

    Raises:
        ConfigError: if they do not fit in `data.cache_gib` or on the disk, or the kept file is damaged.
        DatasetError: if an image cannot be read.
    """
    model = accelerator.unwrap_model(model)
    path = experiment.data.cache / _key(accelerator, model, dataset, experiment)
    with alone(path, wait=True) as partial:
        if not path.exists():
            _compute(accelerator, model, dataset, experiment, partial)
            partial.rename(path)
    _check(path)
    return CachedViews(path, dataset.labels)


def _key(
    accelerator: Accelerator,
    model: EmbeddingModel,
    dataset: Glyphs | ImageSet,
    experiment: Experiment,
) -> str:
    """Name of all that the outputs depend on."""
    data = experiment.data
    described = [
        *(experiment.seed, experiment.precision, accelerator.device.type, torch.__version__),
        *(data.cached_views, data.stage, dataset.view, getattr(dataset, "views", None)),
        *(experiment.model.trunk, experiment.model.frozen_stages, dataset.fingerprint),
        *(dataset.name(i) for i in range(len(dataset))),
    ]
    digest = hashlib.sha256(json.dumps(described, default=str).encode())
    for name, tensor in model.frozen_stages.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _compute(
    accelerator: Accelerator,
    model: EmbeddingModel,
    dataset: Glyphs | ImageSet,
    experiment: Experiment,
    folder: Path,
) -> None:
    views = experiment.data.cached_views
    assert views is not None
    seeds = np.random.default_rng((experiment.seed, 2)).integers(2**63, size=views).tolist()
    keys = [(i, seed) for i in range(len(dataset)) for seed in seeds]
    loader = DataLoader(
        dataset,
        batch_sampler=[keys[start:][:BATCH] for start in range(0, len(keys), BATCH)],
        num_workers=num_workers(experiment.data, accelerator.num_processes),
        generator=torch.Generator(),
        worker_init_fn=ignore_signals,
    )
    bar = progress_bar(loader, desc="frozen stages", unit="batch", leave=False)
    file, done = None, 0
    for images, *_ in bar:
        with accelerator.autocast():
            images = images.to(accelerator.device, next(model.parameters()).dtype)
            outputs = model.frozen_stages.lower(images).cpu()
        stored = outputs.view(_STORED.get(outputs.dtype, outputs.dtype)).numpy()
        if file is None:
            shape = (len(dataset), views, *stored.shape[1:])
            _check_room(folder, stored.itemsize * int(np.prod(shape)), experiment.data.cache_gib)
            file = np.lib.format.open_memmap(
                folder / "outputs.npy", mode="w+", dtype=stored.dtype, shape=shape
            )
            rows = file.reshape(-1, *stored.shape[1:])
        rows[done : done + len(stored)] = stored
        done += len(stored)
    file.flush()
    with (folder / "outputs.npy").open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    about = {"dtype": str(outputs.dtype).removeprefix("torch."), "sha256": digest}
    (folder / "about.json").write_text(json.dumps(about))


def _check_room(folder: Path, needed: int, most_gib: float) -> None:
    free = shutil.disk_usage(folder).free
    if needed > min(most_gib * 2**30, free):
        raise ConfigError(
            f"data.cached_views: the outputs need {needed / 2**30:.1f} GiB, data.cache_gib allows {most_gib:g} and "
            f"{free / 2**30:.1f} are free in {folder.parent}; take fewer views, freeze more stages, or set "
            "data.cache_gib or data.cache"
        )


def _check(path: Path) -> None:
    try:
        told = json.loads((path / "about.json").read_text())["sha256"]
        with (path / "outputs.npy").open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == told
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise ConfigError(f"data.cache: {path} is damaged; delete it, and it is computed again")
