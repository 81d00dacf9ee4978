"""Measures the time of the classes in `upstream/` beside that of a usual loss, at the sizes of the papers.

    python tools/upstream.py TREE && OMP_NUM_THREADS=1 python tools/upstream_costs.py TREE

A forward and a backward pass on the CPU in float32, by the process's clock: the median of rounds that call
each once.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROUNDS = 3


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "src"))
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils.variance_attention import VarianceAttention
    from torchvision.models import googlenet

    def data(*shape: int, classes: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, requires_grad=True), torch.arange(shape[0]) % classes

    contrastive, energy = losses.ContrastiveLoss(), losses.EnergyConfusionLoss()
    confused = data(128, 512, classes=64)

    varied, varied_labels = data(64, 2048, classes=16)
    attention, variance = VarianceAttention(2048), losses.VarianceEstimationLoss()
    embedder = torch.nn.Linear(2048, 128)

    def attended() -> Tensor:
        loss = contrastive(embedder(attention(varied)), varied_labels)
        return loss + variance(varied, ref_emb=attention.variance.unsqueeze(0))

    images = torch.randn(40, 3, 256, 256)
    trunk = googlenet(weights=None, init_weights=False, aux_logits=False)
    maps, labels = data(40, 1024, 8, 8, classes=5)
    embeddings, _ = data(40, 512, classes=5)
    horde = losses.HORDELoss(contrastive, 1024, 512)

    joined = data(100, 512, classes=100)
    pooled, _ = data(100, 1024, classes=100)
    classes, similarity = losses.CosFaceLoss(100, 512), losses.JRSLoss(num_kernels=[3, 3, 1])

    def joint() -> Tensor:
        features = [pooled, classes.get_logits(joined[0])]
        return classes(*joined) + similarity(*joined, features=features)

    cases: dict[str, Callable[[], Tensor]] = {
        "ContrastiveLoss, 128 embeddings of 512": lambda: contrastive(*confused),
        "EnergyConfusionLoss, the same": lambda: energy(*confused),
        "ContrastiveLoss, 64 features of 2048, 128 dimensions": lambda: contrastive(
            embedder(varied), varied_labels
        ),
        "the same + VarianceAttention and VarianceEstimationLoss": attended,
        "GoogLeNet, 40 images of 256 x 256": lambda: trunk(images).sum(),
        "HORDELoss, their maps of 8 x 8, order 5, moment_dim 8192": lambda: horde(
            embeddings, labels, features=maps
        ),
        "CosFaceLoss, 100 embeddings of 512, 100 classes": lambda: classes(*joined),
        "the same + JRSLoss of three representations": joint,
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS + 1):
        for name, case in cases.items():
            started = time.process_time()
            case().backward()  # type: ignore[no-untyped-call]
            times[name].append(time.process_time() - started)
    for name, found in times.items():
        print(f"{1000 * statistics.median(found[1:]):10.2f} ms  {name}")


if __name__ == "__main__":
    main()
