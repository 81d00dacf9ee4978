"""Embeddings of a dataset for retrieval metrics, computed by one process or many.

Recall@K, R-precision and MAP@R are those of `pml_regularizers.RankAccuracyCalculator`. Every image is a query,
for which all other images are ranked by the distance of the L2-normalised embeddings. An image that is alone in
its class is ranked for others but is no query; without queries, every metric is NaN. If a dataset has queries and
a gallery (In-Shop), each query is ranked against the gallery alone; R is then the number of gallery images of its
class.

Process i modulo the number of processes embeds batch i, so batches are composed as on one process and the
embeddings are equal to the bit; then every process gets all of them. Blocks of queries are shared in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.console import ignore_signals, progress_bar
from benchmarks.records import NonFiniteError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set `model.eval()` inside the context; afterwards every submodule returns to its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
    """Return the embeddings and labels of all images, in dataset order, on the CPU.

    The model runs in evaluation mode, without gradients and without its DDP or torch.compile wrapper. Its modes
    are restored at the end; the global random state does not change.

    Args:
        dataset: `dataset[i]` is (image, label, ...); a `Subset` of such a dataset works as well.
        extract: Function called with the embeddings of a batch right after each forward pass; it returns one more
            vector per image, such as `HORDELoss.descriptor`. The mode of a module that it uses is not changed.
        progress: A progress bar on the main process.
        dtype: Type that the images are cast to, such as `torch.float64` for a model in float64.
    Returns:
        (embeddings (n, E), labels (n,)), and with `extract` the descriptors (n, D) as a third.
    Raises:
        NonFiniteError: if the model or `extract` gives NaN or inf.
    """
    # DDP's forward synchronises buffers, which hangs if processes have unequal numbers of batches; and
    # `unwrap_model`, if it keeps the compilation, removes DDP from the caller's model for good.
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
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
    done: list[list[Tensor]] = []
    with evaluation_mode(model), torch.no_grad():
        for images, labels, *_ in bar:
            embeddings = model(images.to(accelerator.device, dtype))
            more = [] if extract is None else [extract(embeddings).cpu()]
            # A worker's labels lie in shared memory: a copy releases its file handle.
            done.append([embeddings.cpu(), labels.clone(), *more])
    columns = _in_dataset_order(accelerator, batches, done)
    for source, rows in zip(("model", "extract"), columns[::2], strict=False):
        # Least and largest entries, which are NaN if one is: no table of truth values for all entries.
        finite = torch.stack(rows.aminmax(dim=1)).isfinite().all(dim=0)
        if bad := (~finite).nonzero().flatten().tolist():
            raise NonFiniteError(
                f"{source}: NaN or inf for {len(bad)} of {len(rows)} images, at dataset positions "
                f"{', '.join(map(str, bad[:5]))}{', ...' if len(bad) > 5 else ''}; has the training diverged?"
            )
    return columns


def _in_dataset_order(
    accelerator: Accelerator, batches: Sequence[Tensor], done: list[list[Tensor]]
) -> tuple[Tensor, ...]:
    """Make whole columns of the batches that the processes have done, which are dropped on the way."""
    n, processes = sum(map(len, batches)), accelerator.num_processes
    # The first process has a batch; others may have none.
    layouts = gather_object([[(rows.shape[1:], rows.dtype) for rows in done[0]] if done else []])
    columns = [torch.empty(n, *shape, dtype=dtype) for shape, dtype in layouts[0]]
    done.reverse()
    for i, positions in enumerate(batches):
        source = i % processes
        if source == accelerator.process_index:
            for column, rows in zip(columns, done.pop(), strict=True):
                column[positions] = rows
        for column in columns if processes > 1 else ():
            rows = column[positions].to(accelerator.device)
            column[positions] = broadcast(rows, from_process=source).cpu()
    return tuple(columns)
