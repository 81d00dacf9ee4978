"""Retrieval metrics of a model on a dataset, by one process or many.

Recall@K, R-precision and MAP@R are those of `pml_regularizers.RankAccuracyCalculator`. Every image is a query and
all others are ranked for it by the distance of the L2-normalised embeddings. Images without another of their class
are ranked for others but are no queries; where there are no queries, every metric is NaN. Where a dataset has
queries and a gallery (In-Shop), every query is ranked against the gallery alone; R is then the number of gallery
images of its class.

Batch i is embedded by process i modulo the number of processes, so batches are composed as on one process and
the embeddings are equal to the bit; queries are ranked in blocks shared out in the same way. What was embedded
stands once in the memory of a host, and every process writes its rows to their places.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.console import ignore_signals, progress_bar
from benchmarks.evaluation.shared_tensors import exchange, shared_tensor


class NonFiniteEmbeddingsError(ValueError):
    """The model gives NaN or inf for some images; names them."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside; afterwards every submodule is in the mode that it had before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _bare(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """`model` out of DDP and torch.compile.

    DDP's forward synchronises buffers, which hangs where processes have unequal numbers of batches;
    and `unwrap_model` that keeps the compilation takes DDP out of the caller's model for good.
    """
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def embed(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    num_workers: int = 0,
    extract: Callable[[Tensor], Tensor] | None = None,
    progress: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The embeddings and labels of all images, in dataset order, on the CPU, one copy for each host.

    The model runs in evaluation mode, without gradients, out of its DDP or torch.compile wrapper.
    Its modes are restored at the end; the global random state is not touched.

    Args:
        dataset: `dataset[i]` is (image, label, ...); a `Subset` of such a dataset will do.
        extract: Called with the embeddings of a batch right after each forward, gives one more
            vector per image, such as `HORDELoss.descriptor`. A module of its own behind it is
            used in the mode that it is in.
        progress: A progress bar on the main process.
        dtype: What the images are cast to, such as `torch.float64` for a model in float64.
    Returns:
        (embeddings (n, E), labels (n,)), and with `extract` the descriptors (n, D) as a third.
    Raises:
        ValueError: if the dataset is empty, if the model or `extract` does not give one vector
            per image, or if it gives NaN or inf.
    """
    if len(dataset) == 0:
        raise ValueError("dataset: expected at least one image, got none")
    model = _bare(accelerator, model)
    batches = torch.arange(len(dataset)).split(batch_size)
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    # Without a generator of its own, a DataLoader draws its workers' seed from the global one.
    loader = DataLoader(
        dataset,
        batch_sampler=[positions.tolist() for positions in mine],
        num_workers=num_workers,
        generator=torch.Generator(),
        worker_init_fn=ignore_signals,
    )
    shown = progress and accelerator.is_main_process
    bar = progress_bar(loader, shown=shown, desc="embedding", unit="batch", leave=False)
    sources = ("model", "extract")
    done: list[list[Tensor]] = []
    bad: dict[str, list[int]] = {source: [] for source in sources}
    with evaluation_mode(model), torch.no_grad():
        for positions, (images, labels, *_) in zip(mine, bar, strict=True):
            embeddings = model(images.to(accelerator.device, dtype))
            vectors = [embeddings] if extract is None else [embeddings, extract(embeddings)]
            for source, rows in zip(sources, vectors, strict=False):
                if rows.ndim != 2 or len(rows) != len(positions):
                    raise ValueError(
                        f"{source}: expected one vector for each of {len(positions)} images, "
                        f"got shape {tuple(rows.shape)}"
                    )
            vectors = [rows.cpu() for rows in vectors]
            for source, rows in zip(sources, vectors, strict=False):
                bad[source] += positions[~rows.isfinite().all(dim=1)].tolist()
            # Labels made by a worker lie in shared memory: a copy lets go of its file handle.
            done.append([vectors[0], labels.clone(), *vectors[1:]])
    _check_shares(gather_object([(len(dataset), batch_size, bad)]))
    return _in_dataset_order(accelerator, batches, done)


def _check_shares(shares: list[tuple[int, int, dict[str, list[int]]]]) -> None:
    """Of each process, the number of images, the batch size and the positions of bad vectors by their source."""
    sizes = sorted({(images, batch_size) for images, batch_size, _ in shares})
    if len(sizes) > 1:
        raise ValueError(
            "dataset, batch_size: expected the same ones on every process, got (images, batch_size) "
            + ", ".join(map(str, sizes))
        )
    for source in shares[0][2]:
        bad = sorted(position for *_, found in shares for position in found[source])
        if bad:
            more = ", ..." if len(bad) > 5 else ""
            raise NonFiniteEmbeddingsError(
                f"{source}: NaN or inf for {len(bad)} of {shares[0][0]} images, at dataset positions "
                f"{', '.join(map(str, bad[:5]))}{more}; has the training diverged?"
            )


def _in_dataset_order(
    accelerator: Accelerator, batches: Sequence[Tensor], done: list[list[Tensor]]
) -> tuple[Tensor, ...]:
    """Whole columns from those of the batches that this process has done, which are dropped on the way."""
    n = sum(map(len, batches))
    # The first process has a batch; others may have none.
    layouts = gather_object([[(rows.shape[1:], rows.dtype) for rows in done[0]] if done else []])
    columns = [shared_tensor(accelerator, (n, *shape), dtype) for shape, dtype in layouts[0]]
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    for positions in reversed(mine):
        for column, rows in zip(columns, done.pop(), strict=True):
            column[positions] = rows
    for column in columns:
        exchange(accelerator, column, batches)
    return tuple(columns)
