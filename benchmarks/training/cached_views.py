"""The outputs of a trunk's frozen stages for a few fixed views of each image, kept in a file.

Training view v of image i is a function of the run's seed, v and i. A step draws one of an image's views by the
seed that the sampler gives it, so that a step stays a function of the seed and its number. The test view of each
image is kept too, and of the tested classes this one alone, which serves the runs of all seeds.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.building import EmbeddingModel
from benchmarks.console import alone, ignore_signals, progress_bar
from benchmarks.datasets import Glyphs, ImageSet
from benchmarks.records import file_digest
from benchmarks.settings import ConfigError, Experiment, num_workers

BATCH = 64  # images at a time: fixed, so that no output depends on the number of processes

_STORED = {torch.bfloat16: torch.int16}  # numpy has no bfloat16


class CachedViews(Dataset[tuple[Tensor, int, int]]):
    """Images as the kept outputs of the frozen stages.

    Args:
        path: Folder that a `ViewCache` made.
        images: What it was made from.

    Shape:
        `dataset[i, seed]` of a training view, or `dataset[i]` of the test view, is (output, label, index); output
        without its batch dimension, as the stages gave it.
    """

    def __init__(self, path: Path, images: Glyphs | ImageSet) -> None:
        about = json.loads((path / "about.json").read_text())
        self.labels, self.num_classes = images.labels, images.num_classes
        self.is_query = images.is_query
        self._outputs = np.load(path / "outputs.npy", mmap_mode="r")
        self._dtype = getattr(torch, about["dtype"])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, int, int]:
        last = self._outputs.shape[1] - 1  # the test view
        index, view = (key[0], key[1] % last) if isinstance(key, tuple) else (key, last)
        output = torch.from_numpy(self._outputs[index, view].copy())
        return output.view(self._dtype), int(self.labels[index]), index


class ViewCache:
    """Folder of the outputs that a run needs; runs with the same ones share it.

    Args:
        model: The network, on its device and in its precision, as it starts.
        dataset: The images.
        test: Keep no training views of them.

    Raises:
        ConfigError: if they are damaged, or if they are not there yet and need more than `data.cache_gib` or the
            disk has.
        DatasetError: if an image cannot be read.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        dataset: Glyphs | ImageSet,
        experiment: Experiment,
        *,
        test: bool = False,
    ) -> None:
        self.accelerator = accelerator
        self.model: EmbeddingModel = accelerator.unwrap_model(model)
        self.dataset = dataset
        self.experiment = experiment
        self.views = 0 if test else experiment.data.cached_views or 0
        self.path = experiment.data.cache / self._key()
        if self.path.exists():
            _check(self.path)
        else:
            self._check_room()

    def open(self) -> CachedViews:
        """The outputs, computed unless they are there; other processes that need them wait.

        Raises:
            DatasetError: if an image cannot be read.
        """
        with alone(self.path, wait=True) as partial:
            if not self.path.exists():
                self._compute(partial)
                partial.rename(self.path)
        return CachedViews(self.path, self.dataset)

    def view_seeds(self) -> list[int]:
        """The seeds of the training views that are kept of each image."""
        generator = np.random.default_rng((self.experiment.seed, 2))
        seeds: list[int] = generator.integers(2**63, size=self.views).tolist()
        return seeds

    def _key(self) -> str:
        """Name of all that the outputs depend on."""
        experiment, data, dataset = self.experiment, self.experiment.data, self.dataset
        described = [
            *(self.views and experiment.seed, experiment.precision, self.accelerator.device.type),
            *(self.views, "and the test view", data.stage),
            *(dataset.view, getattr(dataset, "views", None)),
            *(experiment.model.trunk, experiment.model.frozen_stages, torch.__version__),
            *(experiment.model.channels_last, experiment.model.trunk_args),
            *(dataset.fingerprint, *(dataset.name(i) for i in range(len(dataset)))),
        ]
        if isinstance(dataset, ImageSet):  # the fingerprint has sizes only
            root = dataset.listing.root
            paths = (root / dataset.name(i) for i in range(len(dataset)))
            described += [path.stat().st_mtime_ns for path in paths]
        digest = hashlib.sha256(json.dumps(described, default=str).encode())
        for name, tensor in self.model.frozen_stages.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _outputs(self, images: Tensor) -> Tensor:
        """The frozen stages' outputs of a batch, on the CPU."""
        with self.accelerator.autocast():
            dtype = next(self.model.parameters()).dtype
            outputs = self.model.frozen_stages.lower(images.to(self.accelerator.device, dtype))
        return outputs.cpu()

    def _check_room(self) -> None:
        image, *_ = self.dataset[0]
        output = self._outputs(image[None])
        data = self.experiment.data
        needed = output.nbytes * len(self.dataset) * (self.views + 1)
        free = psutil.disk_usage(_existing(data.cache)).free
        if needed > min(data.cache_gib * 2**30, free):
            raise ConfigError(
                f"data.cached_views: {needed / 2**30:.2g} GiB are needed, data.cache_gib allows "
                f"{data.cache_gib:g}, and {free / 2**30:.2g} are free at {data.cache}; take fewer views, "
                "freeze more stages, or set data.cache_gib or data.cache"
            )

    def _compute(self, folder: Path) -> None:
        seeds = self.view_seeds()
        keys: list[int | tuple[int, int]] = []
        for i in range(len(self.dataset)):
            keys += [*((i, seed) for seed in seeds), i]
        batches = [keys[start:][:BATCH] for start in range(0, len(keys), BATCH)]
        loader = DataLoader(
            self.dataset,
            batch_sampler=batches,
            num_workers=num_workers(self.experiment.data, self.accelerator.num_processes),
            generator=torch.Generator(),
            worker_init_fn=ignore_signals,
        )
        path, rows, done = folder / "outputs.npy", None, 0
        for images, *_ in progress_bar(loader, desc="frozen stages", unit="batch", leave=False):
            outputs = self._outputs(images)
            stored = outputs.view(_STORED.get(outputs.dtype, outputs.dtype)).numpy()
            if rows is None:
                shape = (len(self.dataset), len(keys) // len(self.dataset), *stored.shape[1:])
                file = np.lib.format.open_memmap(path, "w+", dtype=stored.dtype, shape=shape)
                rows = file.reshape(-1, *stored.shape[1:])
            rows[done : done + len(stored)] = stored
            done += len(stored)
        file.flush()
        about = {"dtype": str(outputs.dtype).removeprefix("torch."), "sha256": file_digest(path)}
        (folder / "about.json").write_text(json.dumps(about))


def _existing(path: Path) -> Path:
    """The nearest folder above a path that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _check(path: Path) -> None:
    try:
        same = json.loads((path / "about.json").read_text())["sha256"] == file_digest(
            path / "outputs.npy"
        )
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise ConfigError(f"data.cache: {path} is damaged; delete it, and it is computed again")
