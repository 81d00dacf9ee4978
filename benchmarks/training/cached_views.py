"""The outputs of a trunk's frozen stages for a few fixed views of each image, kept in a file.

Training view v of image i is a function of the run's seed, v and i. A step draws one of an image's views by the
seed that the sampler gives it, so that a step stays a function of the seed and its number. The test view of each
image is kept too, and of the tested classes this one alone, which serves the runs of all seeds.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.building.network import EmbeddingModel
from benchmarks.console.printing import progress_bar
from benchmarks.console.stopping import ignore_signals
from benchmarks.console.writing import alone, replacing
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.records.files import file_digest
from benchmarks.settings.data import num_workers
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment

BATCH = 64  # images at a time: fixed, so that no output depends on the number of processes


class CachedViews(Dataset[tuple[Tensor, int, int]]):
    """Images as the kept outputs of the frozen stages; runs with the same ones share the folder.

    After `open`, `dataset[i, seed]` of a training view, or `dataset[i]` of the test view, is (output, label,
    index); output without its batch dimension, as the stages gave it.

    Args:
        model: The network, on its device and in its precision, as it starts.
        images: What to keep the outputs of.
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
        images: Glyphs | ImageSet,
        experiment: Experiment,
        *,
        test: bool = False,
    ) -> None:
        self.labels, self.num_classes = images.labels, images.num_classes
        self.ranking, self.images = images.ranking, images
        self.accelerator, self.experiment = accelerator, experiment
        self.model: EmbeddingModel = accelerator.unwrap_model(model)
        assert self.model.frozen_stages is not None
        self.stages = self.model.frozen_stages
        self.views = 0 if test else experiment.data.cached_views or 0
        generator = np.random.default_rng((experiment.seed, 2))
        self.view_seeds: list[int] = generator.integers(2**63, size=self.views).tolist()
        self.path = experiment.data.cache / self._key()
        if not self.path.exists():
            self._check_room()
        elif self._is_damaged():
            raise ConfigError(
                f"data.cache: {self.path} is damaged; delete it, and it is computed again"
            )

    def open(self) -> Self:
        """Find the outputs, or compute them; other processes that need them wait."""
        with alone(self.path, wait=True) as partial:
            if not self.path.exists():
                self._compute(partial)
                partial.rename(self.path)
        about = json.loads((self.path / "about.json").read_text())
        file, size = str(self.path / "outputs.bin"), math.prod(about["shape"])
        stored = torch.from_file(file, size=size, dtype=getattr(torch, about["dtype"]))  # mapped
        self._outputs = stored.view(about["shape"])
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, int, int]:
        # The test view is the last one.
        index, view = (key[0], key[1] % self.views) if isinstance(key, tuple) else (key, self.views)
        return self._outputs[index, view].clone(), int(self.labels[index]), index

    def _key(self) -> str:
        """Name of all that the outputs depend on."""
        experiment, data, images = self.experiment, self.experiment.data, self.images
        described = [
            *(self.views and experiment.seed, experiment.precision, self.accelerator.device.type),
            *(self.views, data.stage, images.view, getattr(images, "views", None)),
            *(experiment.model.trunk, experiment.model.frozen_stages, torch.__version__),
            *(experiment.model.channels_last, experiment.model.trunk_args),
            *(images.fingerprint, *(images.name(i) for i in range(len(images)))),
        ]
        if isinstance(images, ImageSet):  # the fingerprint has sizes only
            described += [digests.content for digests in images.digests]
        digest = hashlib.sha256(json.dumps(described, default=str).encode())
        for name, tensor in self.stages.frozen.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _is_damaged(self) -> bool:
        try:
            about = json.loads((self.path / "about.json").read_text())
            return bool(about["sha256"] != file_digest(self.path / "outputs.bin"))
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def _check_room(self) -> None:
        output, data = self._lowered(self.images[0][0][None]), self.experiment.data
        needed = output.nbytes * len(self) * (self.views + 1)
        folders = (data.cache.absolute(), *data.cache.absolute().parents)
        above = next(folder for folder in folders if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise ConfigError(
                f"data.cache: expected a folder to write to, got {data.cache}; choose another one"
            )
        free = psutil.disk_usage(above).free
        if needed > min(data.cache_gib * 2**30, free):
            raise ConfigError(
                f"data.cached_views: {needed / 2**30:.2g} GiB are needed, data.cache_gib allows "
                f"{data.cache_gib:g}, and {free / 2**30:.2g} are free at {data.cache}; take fewer views, "
                "freeze more stages, or set data.cache_gib or data.cache"
            )

    def _lowered(self, images: Tensor) -> Tensor:
        """The frozen stages' outputs of a batch, on the CPU."""
        with self.accelerator.autocast():
            dtype = next(self.model.parameters()).dtype
            outputs: Tensor = self.stages.lower(images.to(self.accelerator.device, dtype))
        return outputs.cpu()

    def _compute(self, folder: Path) -> None:
        """Write the outputs one after the other: of each image the training views, then the test view."""
        keys: list[int | tuple[int, int]] = []
        for i in range(len(self)):
            keys += [*((i, seed) for seed in self.view_seeds), i]
        loader = DataLoader(
            self.images,
            batch_sampler=[keys[start : start + BATCH] for start in range(0, len(keys), BATCH)],
            num_workers=num_workers(self.experiment.data, self.accelerator.num_processes),
            generator=torch.Generator(),
            worker_init_fn=ignore_signals,
        )
        path = folder / "outputs.bin"
        with replacing(path) as file:
            for images, *_ in progress_bar(loader, desc="frozen stages", unit="batch", leave=False):
                outputs = self._lowered(images)
                file.write(outputs.view(torch.uint8).numpy().data)
        shape = [len(self), self.views + 1, *outputs.shape[1:]]
        dtype = str(outputs.dtype).removeprefix("torch.")
        about = {"dtype": dtype, "shape": shape, "sha256": file_digest(path)}
        (folder / "about.json").write_text(json.dumps(about))
