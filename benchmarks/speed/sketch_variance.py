"""Measures the spread of the estimates by HORDE's fixed projections, by kind, width and similarity of the images.

    python -m benchmarks.speed.sketch_variance [--tiny] [--output docs/sketch_variance.svg]

The feature maps are those of Glyphs by a GoogLeNet with random weights. Such weights make all images alike, so each
entry is standardised over the images, with a ReLU behind it. <z_k, z_k'> of two images estimates the mean of
<x, y>^k over all pairs of positions; the spread is its standard deviation over draws, divided by that mean.
"""

import sys
import tempfile
from collections.abc import Sequence

import timm
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.backbones import register
from benchmarks.datasets import Glyphs
from benchmarks.records import replace_file
from benchmarks.reporting import COLOURS, svg
from benchmarks.speed.measuring import page_parser
from pml_regularizers import HighOrderMoments

ORDERS = (2, 5)


def feature_maps(tiny: bool) -> Tensor:
    """Maps (N, C, H, W), each divided by the root mean square length of its features."""
    register()
    trunk = timm.create_model("test_resnet" if tiny else "googlenet", num_classes=0, global_pool="")
    with tempfile.TemporaryDirectory() as folder:
        glyphs = Glyphs(folder, "test", image_size=64, max_classes=2 if tiny else 8)
        images = torch.stack([glyphs[n][0] for n in range(0, len(glyphs), 12)])
    side = 64 if tiny else 256
    images = torch.nn.functional.interpolate(images.expand(-1, 3, -1, -1), side, mode="bilinear")
    with torch.inference_mode():
        maps: Tensor = trunk.eval()(images)
        maps = ((maps - maps.mean(dim=0)) / maps.std(dim=0).clamp(min=1e-9)).relu()
    return maps / maps.square().sum(dim=1).mean(dim=(1, 2)).sqrt().view(-1, 1, 1, 1)


def exact(maps: Tensor) -> Tensor:
    """The inner products that sketches estimate: (orders, N, N)."""
    x = maps.flatten(2).transpose(1, 2)
    products = torch.einsum("npc,mqc->nmpq", x, x)
    return torch.stack([products.pow(k).mean(dim=(2, 3)) for k in ORDERS])


def spread(maps: Tensor, truth: Tensor, projections: str, d: int, draws: int) -> Tensor:
    """Standard deviations relative to the truth: (orders, N, N)."""
    module = HighOrderMoments(maps.shape[1], moment_dim=d, projections=projections)  # type: ignore[arg-type]
    total = torch.zeros_like(truth)
    for _ in range(draws):
        module.reset_parameters()
        moments = module(maps)
        total += torch.stack([(z := moments[k - 2]) @ z.T for k in ORDERS]).sub_(truth).square_()
    return (total / draws).sqrt() / truth


def main(argv: Sequence[str] | None = None) -> int:
    parser = page_parser("benchmarks.speed.sketch_variance", __doc__)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    widths, draws = ((16, 32), 2) if options.tiny else ((512, 1024, 2048, 4096, 8192), 32)
    maps = feature_maps(options.tiny)
    truth = exact(maps)
    cosines = truth[0] / truth[0].diagonal().outer(truth[0].diagonal()).sqrt()
    first, second = torch.triu_indices(len(maps), len(maps), 1)
    ranked = cosines[first, second].argsort()
    pairs = [(first[r], second[r]) for r in ranked[:: max((len(ranked) - 1) // 2, 1)]][:3]
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    panels = figure.subplots(1, len(ORDERS), sharey=True)
    for kind, line in (("random", "--"), ("sketch", "-")):
        found = [spread(maps, truth, kind, d, draws) for d in widths]
        for (i, j), colour in zip(pairs, COLOURS, strict=False):
            label = f"{kind}, {cosines[i, j]:.2f}"
            for k, axes in enumerate(panels):
                points = [one[k, i, j].item() for one in found]
                print(f"order {ORDERS[k]}, {label}:", *(f"{point:.3f}" for point in points))
                axes.plot(widths, points, line, color=colour, label=label)
                axes.set_title(f"order {ORDERS[k]}", fontsize=9)
    panels[0].set_ylabel("standard deviation / true value", fontsize=9)
    if options.output is not None:
        replace_file(
            options.output,
            svg(
                figure,
                "d; in the key, similarities of the images at order 2",
                "The spread of <z, z'>",
            ),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
