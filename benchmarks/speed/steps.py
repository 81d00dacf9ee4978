"""A training step with each method, for `python -m benchmarks.speed`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import Tensor, nn

import pml_regularizers as ours
from benchmarks.backbones import register
from benchmarks.building import FrozenStages
from benchmarks.speed.measuring import Comparison, tensor_bytes

FEW = ("binomial deviance alone", "HORDE, stored", "HORDE, sketch", "HORDE, sketch of d / 4")


def training_step(
    trunk_name: str,
    images: int,
    methods: Sequence[str],
    tiny: bool,
    device: torch.device,
    *,
    side: int = 256,
    order: int = 5,
    d: int = 8192,
    embedding: int = 512,
    frozen_stages: int = 0,
) -> Comparison:
    """A step of the optimizer with the metric loss alone, against the same step with each method, or those named.

    A step is a forward pass, a backward pass and Adam, with 4 images per class, by default at the sizes of HORDE's
    paper. On a GPU, or with frozen stages, whose outputs are kept, the network runs in bfloat16; on a GPU the loss
    runs in TF32. Only a comparison of named methods shows memory.
    """
    if tiny:
        trunk_name, images, side, d, frozen_stages = "test_resnet", 2, 64, 64, min(1, frozen_stages)
    register()
    trunk: Any = timm.create_model(trunk_name, num_classes=0, global_pool="").to(device)
    inputs = torch.randn(images, 3, side, side, device=device)
    labels = torch.arange(images, device=device) // 4
    on_gpu = device.type == "cuda"
    features: Callable[[Tensor], Tensor] = trunk
    size, precision = f"{images} images of {side} px", "float32"
    if frozen_stages:
        stages = FrozenStages(trunk, frozen_stages, inputs)
        features, inputs = stages.upper, stages.lower(inputs).to(torch.bfloat16)
        size += f", {frozen_stages} frozen stages, their outputs kept"
    if half := on_gpu or frozen_stages > 0:
        precision = "trunk in bfloat16" + ", moments in TF32" * on_gpu

    def horde(width: int = d, **options: Any) -> nn.Module:
        options = {"projections": "cascaded", "order": order, "moment_dim": width, **options}
        return ours.HORDELoss(ours.BinomialDevianceLoss(), trunk.num_features, embedding, **options)

    def beside(regularizer: Callable[[], nn.Module]) -> Any:
        return MultipleLosses([ours.BinomialDevianceLoss(), regularizer()])

    losses: dict[str, Callable[[], nn.Module]] = {
        "binomial deviance alone": ours.BinomialDevianceLoss,
        "HORDE, by default": partial(horde, 1024, order=3, projections="sketch"),
        "HORDE, stored": horde,
        "HORDE, recomputed": partial(horde, checkpoint=True),
        "HORDE, fixed projections": partial(horde, projections="random"),
        "HORDE, sketch": partial(horde, projections="sketch"),
        "HORDE, sketch of d / 4": partial(horde, d // 4, projections="sketch"),
        "powers of cosines": lambda: ours.CosinePowersLoss(ours.BinomialDevianceLoss()),
        "energy confusion": lambda: beside(partial(ours.EnergyConfusionRegularizer, gradient="fc")),
        "VEM": partial(beside, ours.VarianceRegularizer),
        "JRS of pooled features and embeddings": partial(beside, ours.JRSRegularizer),
    }

    def step(name: str) -> Callable[[], object]:
        attention = ours.VEMAttention if name == "VEM" else None
        head = ours.EmbeddingHead.for_trunk(trunk, embedding, attention=attention).to(device)
        loss = losses[name]().to(device)
        ours.attach_all(loss, head)
        optimizer = torch.optim.Adam(nn.ModuleList([trunk, head, loss]).parameters(), lr=1e-6)

        def run() -> None:
            torch.set_float32_matmul_precision("high" if on_gpu else "highest")
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                embeddings = head(features(inputs))
            loss(embeddings, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.set_float32_matmul_precision("highest")

        run()  # makes Adam's state before memory is counted
        return run

    return Comparison(
        f"A training step of {trunk_name}" + " with each method" * (not methods),
        f"{size}, HORDE with K = {order} and d = {d:,}, {precision}",
        {name: step(name) for name in methods or losses},
        rounds=25 if frozen_stages else 7 if on_gpu else 3,  # short steps vary more
        memory=tensor_bytes if methods else None,
    )
