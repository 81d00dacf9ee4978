"""The attention-based ensemble against loops, and its losses; test_contract.py has their values."""

import copy
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, reducers
from torch import Tensor, nn

from pml_regularizers import (
    AttentionEnsemble,
    CosinePowersLoss,
    DistributedLoss,
    DivergenceLoss,
    EnsembleLoss,
    HORDELoss,
)
from pml_regularizers.features.feature_tap import FeatureTap
from pml_regularizers.heads.attention_ensemble import between_heads, split_heads
from tests.oracles.ensemble import head_embeddings, head_maps, reduced_maps
from tests.support.tolerances import assert_close

CHANNELS, BODY, HEADS, WIDTH, REDUCED = 4, 5, 3, 2, 6
LABELS = torch.tensor([0, 0, 1, 1, 2])


def ensemble(body: nn.Module | None = None) -> AttentionEnsemble:
    """An ensemble in float64 whose stem and body are one convolution each."""
    made = AttentionEnsemble(
        nn.Conv2d(3, CHANNELS, 3),
        body or nn.Conv2d(CHANNELS, BODY, 1, bias=False),
        stem_channels=CHANNELS,
        body_channels=BODY,
        embedding_size=HEADS * WIDTH,
        num_heads=HEADS,
        map_channels=REDUCED,
    ).double()
    nn.init.normal_(made.mask.bias)  # type: ignore[arg-type]
    return made


def images() -> Tensor:
    return torch.randn(len(LABELS), 3, 5, 4, dtype=torch.float64)


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
    made = ensemble(nn.Sequential(nn.Conv2d(CHANNELS, BODY, 1), norm))
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    made(images())
    assert len(seen) == 1
    assert_close(seen[0].square().mean(dim=(0, 2, 3)), torch.ones(BODY))  # over images and heads


@pytest.mark.parametrize(
    "distance",
    [
        distances.CosineSimilarity(),
        distances.LpDistance(power=2),
        distances.LpDistance(p=1, normalize_embeddings=False),
        distances.SNRDistance(),
    ],
    ids=lambda distance: type(distance).__name__,
)
def test_heads_of_one_image_are_compared_alone(distance: Any) -> None:
    """Value and gradient are those of the whole matrix, the cost is not."""
    margin = 0.5 if distance.is_inverted else 3.0
    made = DivergenceLoss(
        HEADS, margin, images="same", distance=distance, reducer=reducers.SumReducer()
    )
    embeddings = (torch.randn(5, HEADS * WIDTH).double() + 0.7).requires_grad_()
    heads = split_heads(embeddings, HEADS).flatten(0, 1)
    blocks = between_heads(distance(heads), HEADS).diagonal(dim1=1, dim2=2)
    value, expected = made(embeddings), distance.margin(margin, blocks).relu().sum()
    assert_close(value, expected)
    assert_close(*(torch.autograd.grad(v, embeddings)[0] for v in (value, expected)))


def test_horde_reads_the_map_of_the_heads() -> None:
    made, x = ensemble(), images()
    loss = HORDELoss(losses.ContrastiveLoss(), REDUCED, HEADS * WIDTH, moment_dim=7).double()
    tap = FeatureTap({"feature_map": made.feature_map})
    embeddings = made(x)
    expected = loss(embeddings, LABELS, features=tap.take(embeddings)["feature_map"])
    value = loss.attach(made)(made(x), LABELS)
    assert_close(value, expected.item())
    value.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_what_the_loss_inside_takes_and_offers_is_taken_and_offered() -> None:
    x, y, labels = torch.randn(5, 4), torch.randn(5, 4), LABELS
    base, learnt = losses.ContrastiveLoss(), losses.MarginLoss(beta=1.25, learn_beta=True).double()
    heads, others = (split_heads(rows, 2).double().unbind(1) for rows in (x, y))
    right = [learnt(a, labels, None, b, labels) for a, b in zip(heads, others, strict=True)]
    for dtype in (torch.float64, torch.bfloat16):
        loss = EnsembleLoss(learnt, 2).to(dtype)
        found = loss(x, labels, ref_emb=y, ref_labels=labels, enqueue_mask=None)
        assert_close(found, sum(right) / 2)

    keys = torch.tensor([False, True, False, True, True])  # as MoCo's
    memory = losses.CrossBatchMemory(losses.MarginLoss(learn_beta=True), 4)
    again = copy.deepcopy(memory)
    horde = DistributedLoss(HORDELoss(memory, 3, 4, feature_loss=base, moment_dim=5))
    maps = torch.randn(5, 3, 2, 2)
    value = horde(x, labels, enqueue_mask=keys, features=maps)
    orders = horde.loss.order_embeddings(maps)
    assert_close(value, again(x, labels, enqueue_mask=keys) + sum(base(z, labels) for z in orders))
    assert horde.queue_idx == memory.queue_idx == 3
    memory = losses.CrossBatchMemory(base, 2)
    inner = EnsembleLoss(memory, 2)
    HORDELoss(inner, 3, 4, feature_loss=base)(x, labels, enqueue_mask=keys, features=maps)
    later = losses.CrossBatchMemory(base, 5)  # behind a loss that has no use for the mask
    outer = HORDELoss(EnsembleLoss(base, 2), 3, 4, feature_loss=later, moment_dim=5)
    outer(x, labels, enqueue_mask=keys, features=maps)
    assert memory.queue_idx == later.queue_idx == 3

    arcface = losses.SubCenterArcFaceLoss(num_classes=3, embedding_size=4)
    for around in (DistributedLoss(arcface), CosinePowersLoss(arcface, feature_loss=base)):
        assert torch.equal(around.get_logits(x), arcface.get_logits(x))
        assert torch.equal(around.get_outliers(x, labels)[0], arcface.get_outliers(x, labels)[0])
    with pytest.raises(AttributeError, match="attach the HORDELoss before it is wrapped, or call"):
        horde.attach(nn.Identity())
