"""The attention-based ensemble and its losses against loops, finite differences and PML's conventions."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    DivergenceLoss,
    EnsembleLoss,
    FeatureTap,
    HORDELoss,
    VarianceRegularizer,
    split_trunk,
)
from pml_regularizers.attention_ensemble import between_heads, join_heads, split_heads
from tests.oracles.binomial_deviance import binomial_deviance
from tests.oracles.ensemble import divergences, head_embeddings, head_maps, reduced_maps
from tests.support.tolerances import assert_close
from tests.support.toys import timm_model

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


def heads_of(embeddings: Tensor) -> np.ndarray:
    return embeddings.detach().double().reshape(len(embeddings), HEADS, WIDTH).numpy()


def active(values: list[float]) -> float:
    """Mean of those above zero; some are, and some are not, or the mean of all would do."""
    above = [value for value in values if value > 0]
    assert 0 < len(above) < len(values)
    return sum(above) / len(above)


# --- the network ------------------------------------------------------------------------------------------


def test_the_network_equals_the_oracle() -> None:
    made, x = ensemble(), images()
    maps = head_maps(
        made.stem(x).flatten(2).detach().numpy(),
        made.mask.weight.detach().view(HEADS, CHANNELS, CHANNELS).numpy(),
        made.mask.bias.detach().view(HEADS, CHANNELS).numpy(),  # type: ignore[union-attr]
        made.body.weight.detach()[:, :, 0, 0].numpy(),
    )
    tap = FeatureTap(made.feature_map)
    embeddings = made(x)
    heads = head_embeddings(maps, made.head.fc.weight.detach().numpy())
    assert_close(split_heads(embeddings, HEADS), torch.from_numpy(heads))
    found = tap.take(embeddings)
    assert isinstance(found, Tensor) and found.shape == (len(x), REDUCED, 3, 2)
    weight = made.reduction.weight.detach()[:, :, 0, 0].numpy()
    assert_close(found.flatten(2), torch.from_numpy(reduced_maps(maps, weight)))


def test_the_cosine_of_two_images_is_the_mean_of_their_heads_cosines() -> None:
    embeddings = ensemble()(images())
    heads = split_heads(embeddings, HEADS)
    assert_close(embeddings.norm(dim=1), torch.ones(len(LABELS)))
    assert_close(heads.norm(dim=2), torch.ones(len(LABELS), HEADS))
    assert_close(embeddings @ embeddings.T, torch.einsum("ime,jme->ijm", heads, heads).mean(dim=2))
    assert_close(
        torch.cdist(embeddings, embeddings) ** 2,
        (torch.cdist(heads.transpose(0, 1), heads.transpose(0, 1)) ** 2).mean(dim=0),
    )
    assert_close(join_heads(heads), embeddings)


def test_heads_differ_in_their_masks_only() -> None:
    made, x = ensemble(), images()
    heads = split_heads(made(x), HEADS)
    for p, q in ((0, 1), (0, 2), (1, 2)):
        assert (heads[:, p] - heads[:, q]).norm(dim=1).min() > 1e-3
    with torch.no_grad():  # give all heads the mask of the first
        made.mask.weight.copy_(made.mask.weight[:CHANNELS].repeat(HEADS, 1, 1, 1))
        made.mask.bias.copy_(made.mask.bias[:CHANNELS].repeat(HEADS))  # type: ignore[union-attr]
    heads = split_heads(made(x), HEADS)
    assert_close(heads, heads[:, :1].expand_as(heads))


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
    tap = FeatureTap(made.feature_map)
    made(x)
    tap.remove()
    made(x)
    assert len(calls) == 1


def test_gradient_of_the_network_by_finite_differences() -> None:
    made, x = ensemble(), images(2)
    masks, fc = made.mask.weight, made.head.fc.weight

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(
            made, {"mask.weight": weights[0], "head.fc.weight": weights[1]}, x
        )

    assert torch.autograd.gradcheck(forward, (x.requires_grad_(), masks, fc))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stem_channels": 0}, "stem_channels: expected at least 1, got 0"),
        ({"embedding_size": 7}, "embedding_size: expected a multiple of num_heads=3, got 7"),
    ],
)
def test_bad_arguments_of_the_network(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble(**kwargs)


def test_maps_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"stem: expected a map \(N, 4, H, W\), got shape \(5, 9"):
        ensemble(stem=nn.Conv2d(3, 9, 3))(images())
    with pytest.raises(ValueError, match=r"stem: expected a map .* got shape \(5, 4, 6\)"):
        ensemble(stem=nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2)))(images())
    channels_last = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), nn.Flatten(2), nn.Unflatten(2, (3, 2)))
    channels_last.register_forward_hook(lambda module, args, x: x.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match=r"stem: .*got shape \(5, 3, 2, 4\).*channels-last maps"):
        ensemble(stem=channels_last)(images())
    shrinking = nn.Conv2d(CHANNELS, CHANNELS, 2)
    with pytest.raises(ValueError, match=r"attention: expected a map of \(3, 2\).*got \(2, 1\)"):
        ensemble(attention=shrinking)(images())


# --- cutting a trunk --------------------------------------------------------------------------------------


class Skips(nn.Module):
    """Two layers and a connection beside the second; the first may be called twice."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.twice:
            x = self.first(x)
        y: Tensor = self.second(x) + x
        return y


class Branches(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("test_resnet", "layer2"),
        ("test_resnet", "layer3.0"),
        ("test_convnext", "stages.1"),
        ("test_efficientnet", "blocks.2"),
    ],
)
def test_timm_trunks_are_cut_anywhere(name: str, stage: str) -> None:
    trunk = timm_model(name, num_classes=0).eval()
    stem, body = split_trunk(trunk, stage)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(body(stem(x)), trunk.forward_features(x))
    names = [{name for name, _ in part.named_parameters()} for part in (stem, body)]
    assert not names[0] & names[1] and all(names)
    assert names[0] | names[1] <= {name for name, _ in trunk.named_parameters()}
    for part in (stem, body):
        assert not part.training
        assert all(trunk.get_parameter(name) is own for name, own in part.named_parameters())


def test_cuts_that_cannot_be() -> None:
    with pytest.raises(
        ValueError, match=r"stage: expected .* got 'layer9', called 0 times; it calls conv1"
    ):
        split_trunk(timm_model("test_resnet", num_classes=0), "layer9")
    with pytest.raises(ValueError, match=r"got 'first', called 2 times"):
        split_trunk(Skips(twice=True), "first")
    with pytest.raises(ValueError, match=r"stage: add also needs first from before 'second'"):
        split_trunk(Skips(), "second")
    assert len(split_trunk(Skips(), "first")) == 2
    with pytest.raises(ValueError, match=r"trunk: torch\.fx cannot trace Branches"):
        split_trunk(Branches(3, 3, 1), "anything")


class Modal(nn.Module):
    """A network that asks in its own forward whether it is in training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.aux = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.kind == "dropout":
            x = F.dropout(x, 0.5, self.training)
        if self.kind == "constant":
            x = x * torch.tensor([0.5 if self.training else 1.0])
        x = self.second(x)
        if self.kind == "auxiliary" and self.training:
            return x, self.aux(x)
        return x * torch.tensor([2.0])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("kind", "found"),
    [("dropout", "training: True"), ("constant", "mul"), ("auxiliary", "target=aux")],
)
def test_a_cut_does_not_freeze_the_mode_of_a_trunk(kind: str, found: str, training: bool) -> None:
    trunk = Modal(kind).train(training)
    trunk.aux.eval()
    with pytest.raises(ValueError, match="trunk: Modal computes different things in tr") as error:
        split_trunk(trunk, "first")
    here, there = str(error.value).split(" mode is ")
    assert here.endswith("in train" if training else "in eval")
    if kind != "constant":  # of which the names are the same
        assert found in (here if training else there)
    assert trunk.training == trunk.second.training == training and not trunk.aux.training


def test_an_ensemble_of_a_timm_trunk() -> None:
    trunk = timm_model("test_convnext", num_classes=0)
    made = AttentionEnsemble.for_trunk(trunk, "stages.1", embedding_size=16, num_heads=4)
    assert (made.stem_channels, made.head.in_channels) == (32, trunk.num_features)
    x = torch.randn(2, 3, 64, 64)
    assert made(x).shape == (2, 16)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert_close(again(x), made(x))
    made(x).sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert not made.eval().stem.training and not made.body.stages.training  # type: ignore[union-attr]


def test_the_layers_of_the_masks_may_be_a_copy_of_the_body() -> None:
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 7, 1), nn.Conv2d(7, 5, 3))
    sizes = {"stem_channels": 4, "attention_channels": 7, "body_channels": 5, "embedding_size": 8}
    made = AttentionEnsemble.for_trunk(trunk, "0", attention_stage="1", **sizes)
    copied, own = dict(made.attention.named_parameters()), dict(made.body.named_parameters())
    assert set(copied) == {"1.weight", "1.bias"} < set(own)
    assert torch.equal(copied["1.weight"], own["1.weight"])
    assert copied["1.weight"] is not own["1.weight"]
    assert made(torch.randn(2, 3, 6, 6)).shape == (2, 8)
    for missing in sizes.keys() - {"embedding_size"}:
        with pytest.raises(ValueError, match=f"{missing}: Sequential does not state it"):
            rest = {name: size for name, size in sizes.items() if name != missing}
            AttentionEnsemble.for_trunk(trunk, "0", attention_stage="1", **rest)


# --- the divergence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("m_div", [0.4, 1.0, 1.7])
def test_the_margin_of_the_paper(m_div: float) -> None:
    embeddings = vectors()
    exact = sum(divergences(heads_of(embeddings), m_div, same=True))
    printed = DivergenceLoss(
        HEADS,
        m_div,
        images="same",
        distance=distances.LpDistance(power=2),
        reducer=reducers.SumReducer(),
    )
    assert_close(printed(embeddings), exact)
    cosine = DivergenceLoss(HEADS, 1 - m_div / 2, images="same", reducer=reducers.SumReducer())
    assert_close(2 * cosine(embeddings), exact)


def test_a_divergence_by_hand() -> None:
    """Two images, two heads: cosines 0.8 and 0 within the images, 1 and 0.6 across them."""
    embeddings = torch.tensor([[1.0, 0, 0.8, 0.6], [0, 1, 1, 0]], dtype=torch.float64)
    assert_close(DivergenceLoss(2, images="same")(embeddings), 0.3)
    assert_close(DivergenceLoss(2)(embeddings), (0.3 + 0.5 + 0.1) / 3)
    assert_close(DivergenceLoss(2, reducer=reducers.MeanReducer())(embeddings), 0.9 / 4)


def test_what_the_divergence_ignores() -> None:
    embeddings, loss = vectors(), DivergenceLoss(HEADS)
    value = loss(embeddings)
    assert torch.equal(loss(embeddings, LABELS), value)
    mined = miners.MultiSimilarityMiner(epsilon=1)(embeddings, LABELS)
    assert torch.equal(loss(embeddings, LABELS, mined), value)
    shuffle, heads = torch.randperm(len(LABELS)), torch.randperm(HEADS)
    lengths = torch.rand(len(LABELS), HEADS, 1, dtype=torch.float64) + 0.1
    moved = (split_heads(embeddings, HEADS) * lengths)[shuffle][:, heads]
    assert_close(loss(moved.flatten(1)), value)


@pytest.mark.parametrize(
    "distance",
    [
        distances.CosineSimilarity(),
        distances.DotProductSimilarity(normalize_embeddings=False),
        distances.LpDistance(power=2),
        distances.LpDistance(p=1, normalize_embeddings=False),
        distances.SNRDistance(),
    ],
    ids=lambda distance: type(distance).__name__,
)
def test_heads_of_one_image_are_compared_alone(distance: Any) -> None:
    """Value, gradient and records are those of the whole matrix, the cost is not."""
    margin, reducer = 0.5 if distance.is_inverted else 3.0, reducers.SumReducer()
    made = DivergenceLoss(HEADS, margin, images="same", distance=distance, reducer=reducer)
    embeddings = vectors().requires_grad_()
    heads = split_heads(embeddings, HEADS).flatten(0, 1)
    distance.collect_stats = True
    blocks = between_heads(distance(heads), HEADS).diagonal(dim1=1, dim2=2)
    norms = distance.initial_avg_query_norm, distance.final_avg_query_norm
    expected = distance.margin(margin, blocks).relu().sum()
    distance.initial_avg_query_norm = distance.final_avg_query_norm = -1.0
    value = made(embeddings)
    assert (distance.initial_avg_query_norm, distance.final_avg_query_norm) == norms
    distance.collect_stats = False
    assert_close(value, expected)
    for found, exact in zip(
        torch.autograd.grad(value, embeddings),
        torch.autograd.grad(expected, embeddings),
        strict=True,
    ):
        assert_close(found, exact)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_heads": 1}, "num_heads: expected at least 2, got 1"),
        ({"num_heads": 2, "images": "some"}, "images: expected one of all, same; got 'some'"),
    ],
)
def test_bad_arguments_of_the_divergence(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DivergenceLoss(**kwargs)


def test_embeddings_that_no_heads_make() -> None:
    with pytest.raises(ValueError, match="num_heads: expected at least 1, got 0"):
        split_heads(vectors(), 0)
    for loss in (DivergenceLoss(4), EnsembleLoss(losses.ContrastiveLoss(), 4)):
        with pytest.raises(
            ValueError, match=r"embeddings: expected \(N, 4 x E\).*got shape \(5, 6\)"
        ):
            loss(vectors(), LABELS)


# --- the loss of the heads --------------------------------------------------------------------------------


def test_a_loss_that_measures_lengths_sees_heads_of_length_one() -> None:
    embeddings = ensemble()(images())
    raw = distances.DotProductSimilarity(normalize_embeddings=False)
    loss, plain = losses.NTXentLoss(distance=raw), losses.NTXentLoss()
    assert_close(
        EnsembleLoss(loss, HEADS)(embeddings, LABELS),
        EnsembleLoss(plain, HEADS)(embeddings, LABELS),
    )


@pytest.mark.parametrize(
    "loss",
    [
        losses.ProxyAnchorLoss(3, HEADS * WIDTH),
        losses.CrossBatchMemory(losses.ContrastiveLoss(), HEADS * WIDTH),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_made_for_the_whole_embedding(loss: nn.Module) -> None:
    message = rf"loss: {type(loss).__name__} failed on .* \(5, 2\) .*that of one head, 2"
    with pytest.raises(ValueError, match=message):
        EnsembleLoss(loss, HEADS)(vectors(dtype=torch.float32), LABELS)


@pytest.mark.parametrize("state", [False, True])
def test_errors_that_no_width_explains_pass(state: bool) -> None:
    class Fails(losses.ContrastiveLoss):
        def forward(self, *args: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("full") if state else RuntimeError("full")

    loss = Fails()
    if state:
        loss.register_buffer("memory", torch.zeros(1))
    with pytest.raises(RuntimeError, match="full"):
        EnsembleLoss(loss, HEADS)(vectors(), LABELS)


def test_mined_tuples_serve_every_head() -> None:
    embeddings = vectors()
    mined = miners.BatchHardMiner()(embeddings, LABELS)
    base = losses.TripletMarginLoss()
    exact = [base(head, LABELS, mined) for head in split_heads(embeddings, HEADS).unbind(1)]
    value = EnsembleLoss(base, HEADS)(embeddings, LABELS, mined)
    assert_close(value, sum(exact) / HEADS)
    assert not torch.isclose(value, EnsembleLoss(base, HEADS)(embeddings, LABELS))


def test_a_memory_for_each_head() -> None:
    base = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=20)
    loss = EnsembleLoss(base, HEADS)
    first, second = (F.normalize(vectors(dtype=torch.float32)) for _ in range(2))
    fresh = EnsembleLoss(losses.ContrastiveLoss(), HEADS)
    assert_close(loss(first, LABELS), fresh(first, LABELS))
    assert not torch.isclose(loss(second, LABELS), fresh(second, LABELS))
    with pytest.raises(ValueError, match="indices_tuple: CrossBatchMemory would take"):
        loss(first, LABELS, miners.BatchHardMiner()(first, LABELS))


@pytest.mark.parametrize(
    ("loss", "kwargs", "message"),
    [
        (losses.ContrastiveLoss(), {"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        (losses.ContrastiveLoss(), {"reduction": "max"}, "reduction: .* got 'max'"),
        (VarianceRegularizer(), {}, "loss: VarianceRegularizer reads features"),
    ],
)
def test_bad_arguments_of_the_loss_of_the_heads(
    loss: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EnsembleLoss(loss, **{"num_heads": HEADS, **kwargs})


# --- HORDE on an ensemble ---------------------------------------------------------------------------------


def horde(**kwargs: Any) -> HORDELoss:
    first = EnsembleLoss(
        BinomialDevianceLoss(),
        HEADS,
        embedding_regularizer=DivergenceLoss(HEADS),
        embedding_reg_weight=0.5,
    )
    return HORDELoss(
        BinomialDevianceLoss(),
        REDUCED,
        HEADS * WIDTH,
        order=3,
        moment_dim=7,
        order_weights="mean",
        first_loss=first,
        **kwargs,
    ).double()


def test_horde_on_the_heads_maps() -> None:
    made, loss, x = ensemble(), horde(collect_stats=True), images()
    tap = FeatureTap(made.feature_map)
    features = tap.take(made(x))
    value = loss.attach(made)(made(x), LABELS)
    orders = loss.order_embeddings(features)
    heads = heads_of(made(x))
    exact = sum(binomial_deviance(heads[:, m], LABELS.tolist()) for m in range(HEADS)) / HEADS
    exact += 0.5 * active(divergences(heads)) / 2
    assert loss.order_1_loss == pytest.approx(exact, rel=1e-10)
    exact += sum(binomial_deviance(z.detach().numpy(), LABELS.tolist()) for z in orders) / 2
    assert_close(value, exact)
    value.backward()
    for name, parameter in (*made.named_parameters(), *loss.named_parameters()):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
