"""The attention-based ensemble and its losses against loops, finite differences and PML's conventions."""

from typing import Any

import torch
from torch import Tensor, nn

from pml_regularizers import AttentionEnsemble
from pml_regularizers.features.feature_tap import FeatureTap
from pml_regularizers.heads.attention_ensemble import split_heads
from tests.oracles.ensemble import head_embeddings, head_maps, reduced_maps
from tests.support.tolerances import assert_close

CHANNELS, BODY, HEADS, WIDTH, REDUCED = 4, 5, 3, 2, 6
LABELS = torch.tensor([0, 0, 1, 1, 2])


def ensemble(**kwargs: Any) -> AttentionEnsemble:
    """An ensemble in float64 whose stem and body are one convolution each."""
    settings: dict[str, Any] = {
        "stem": nn.Conv2d(3, CHANNELS, 3),
        "body": nn.Conv2d(CHANNELS, BODY, 1, bias=False),
        "stem_channels": CHANNELS,
        "body_channels": BODY,
        "embedding_size": HEADS * WIDTH,
        "num_heads": HEADS,
        "map_channels": REDUCED,
    }
    made = AttentionEnsemble(**{**settings, **kwargs}).double()
    nn.init.normal_(made.mask.bias)  # type: ignore[arg-type]
    return made


def images(count: int = len(LABELS)) -> Tensor:
    return torch.randn(count, 3, 5, 4, dtype=torch.float64)


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings whose heads lie close enough to each other to be pushed apart."""
    return (torch.randn(count, HEADS * WIDTH, dtype=torch.float64) + 0.7).to(dtype)


def test_the_network_equals_the_oracle() -> None:
    made, x = ensemble(), images()
    maps = head_maps(
        made.stem(x).flatten(2).detach().numpy(),
        made.mask.weight.detach().view(HEADS, CHANNELS, CHANNELS).numpy(),
        made.mask.bias.detach().view(HEADS, CHANNELS).numpy(),  # type: ignore[union-attr]
        made.body.weight.detach()[:, :, 0, 0].numpy(),
    )
    tap = FeatureTap({"feature_map": made.feature_map})
    embeddings = made(x)
    heads = head_embeddings(maps, made.head.fc.weight.detach().numpy())
    assert_close(split_heads(embeddings, HEADS), torch.from_numpy(heads))
    found = tap.take(embeddings)["feature_map"]
    assert isinstance(found, Tensor) and found.shape == (len(x), REDUCED, 3, 2)
    weight = made.reduction.weight.detach()[:, :, 0, 0].numpy()
    assert_close(found.flatten(2), torch.from_numpy(reduced_maps(maps, weight)))


def test_masks_start_as_one_glorot_layer_for_each_head() -> None:
    made = AttentionEnsemble(
        nn.Identity(), nn.Identity(), stem_channels=24, body_channels=24, embedding_size=32
    )
    bound = (6 / (24 + 24)) ** 0.5
    assert 0.95 * bound < made.mask.weight.abs().max() < bound
    assert made.mask.bias.abs().max() == 0  # type: ignore[union-attr]


def test_the_body_normalises_all_heads_by_one_batch() -> None:
    norm = nn.BatchNorm2d(BODY, eps=1e-30)
    made, x = ensemble(body=nn.Sequential(nn.Conv2d(CHANNELS, BODY, 1), norm)), images()
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    made(x)
    assert len(seen) == 1 and norm.num_batches_tracked == 1
    assert_close(seen[0].square().mean(dim=(0, 2, 3)), torch.ones(BODY))  # over images and heads
    made.eval()
    assert_close(made(x)[:1], made(x[:1]))


def test_the_map_is_computed_on_demand_only() -> None:
    made, x, calls = ensemble(), images(), []
    made.reduction.register_forward_hook(lambda *_: calls.append(1))
    made(x)
    assert not calls
    tap = FeatureTap({"feature_map": made.feature_map})
    made(x)
    tap.remove()
    made(x)
    assert len(calls) == 1
