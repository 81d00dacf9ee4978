"""Arguments that are out of range, of another kind or of another shape: an error that names them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, reducers
from torch import nn

from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    DistributedLoss,
    DivergenceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    EnsembleLoss,
    HighOrderMoments,
    HORDELoss,
    JRDLoss,
    JRSRegularizer,
    LaplaceKernel,
    PolynomialKernel,
    RankAccuracyCalculator,
    VarianceRegularizer,
    VEMAttention,
    prepare_loss,
)
from pml_regularizers.functional.moments import sketched_moments

CONTRASTIVE, LINEAR = losses.ContrastiveLoss(), PolynomialKernel(1, constant=0.0)
X, LABELS = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
MASK = torch.ones(2, 3, dtype=torch.bool)
MAP = torch.randn(6, 5, 2, 2)
POOLED = {"pooled": torch.randn(6, 5)}
TABLES = torch.tensor([[[1], [-2], [3], [4], [0]], [[0], [4], [3], [2], [-1]]], dtype=torch.int32)

horde = partial(HORDELoss, in_channels=5, embedding_size=4, order=4, moment_dim=6)
head = partial(EmbeddingHead, 5, 4)
moments = partial(HighOrderMoments, 5, moment_dim=7)
network = partial(AttentionEnsemble, nn.Identity(), nn.Identity(), body_channels=4, num_heads=3)
confusion = partial(EnergyConfusionRegularizer, gradient="all")
jrd = partial(JRDLoss, 3, 4)
calculator = partial(RankAccuracyCalculator, device=torch.device("cpu"))


def ranked(*call: Any) -> Any:
    return calculator().get_accuracy(*call)


def within(**masks: Any) -> Any:
    return calculator().get_accuracy_within(torch.eye(4), torch.arange(4), **masks)


def sketches(*tables: torch.Tensor) -> Any:
    return sketched_moments(torch.randn(2, 3, 4), tables)


Refused = list[tuple[Callable[[], object], str]]
PAIRS: Refused = [
    (lambda: BinomialDevianceLoss(alpha=0), "alpha: expected a positive number, got 0"),
    (lambda: BinomialDevianceLoss(negative_weight=-1.5), "negative_weight: .*, got -1.5"),
    (
        lambda: prepare_loss(object()),
        r"loss: expected a module, got object; call prepare_loss\(loss\)",
    ),
    (lambda: prepare_loss(CONTRASTIVE, object()), r"loss: .* prepare_loss\(accelerator, loss\)"),
    (
        lambda: DistributedLoss(CONTRASTIVE)(X, LABELS, features=X),
        "features: .* takes none; attach the losses inside",
    ),
]
ENERGY_CONFUSION: Refused = [
    (lambda: confusion(gradient="trunk"), "gradient: expected one of fc, all; got 'trunk'"),
    (lambda: confusion(distance=distances.CosineSimilarity()), "distance: .* got CosineSimilarity"),
    (lambda: confusion()(X[:, :, None], LABELS), "embeddings must be a 2D tensor"),
    *(
        (
            lambda features=features: confusion(gradient="fc")(X, LABELS, features=features),
            r"features: gradient=\"fc\" reads embeddings \(n, 4\)",
        )
        for features in (X[:, :3], X[:, :, None], (X, X))
    ),
]
ENSEMBLES: Refused = [
    (
        lambda: network(stem_channels=4, embedding_size=7),
        "embedding_size: .* of num_heads=3, got 7",
    ),
    (lambda: DivergenceLoss(1), "num_heads: expected at least 2, got 1"),
    (lambda: DivergenceLoss(2, images="some"), "images: expected one of all, same; got 'some'"),
    (lambda: DivergenceLoss(3)(X), r"embeddings: expected \(N, 3 x E\).*got shape \(6, 4\)"),
    (lambda: EnsembleLoss(VarianceRegularizer(), 2), "loss: VarianceRegularizer reads features"),
    *(
        (
            lambda loss=loss: EnsembleLoss(loss, 2)(X, LABELS),
            rf"loss: {type(loss).__name__} failed on the vectors \(6, 2\) of head_1 .* must be 2$",
        )
        for loss in (losses.ProxyAnchorLoss(3, 4), losses.CrossBatchMemory(CONTRASTIVE, 4))
    ),
]
HEADS: Refused = [
    (lambda: EmbeddingHead(0, 4), "in_channels: expected at least 1, got 0"),
    (lambda: head(num_prefix_tokens=-1), "num_prefix_tokens: expected at least 0, got -1"),
    (lambda: head(pool="token"), "num_prefix_tokens: expected at least 1, got 0"),
    (lambda: head(pool="mean"), "pool: expected one of avg, max, token; got 'mean'"),
    (
        lambda: head()(torch.zeros(2, 4, 3, 3)),
        r"x: expected one axis of 5 channels.* got shape \(2, 4, 3, 3\)",
    ),
    (lambda: head()([torch.zeros(2, 5, 3, 3)]), "x: expected a trunk's map .* got list; pass"),
    (lambda: head()(torch.zeros(2, 4, 5), MASK), "boolean mask"),
    (
        lambda: head(pool="token", num_prefix_tokens=1)(torch.randn(4, 5, 2, 3)),
        'pool: "token" needs tokens',
    ),
    *(
        (
            lambda shape=shape: VEMAttention(6)(torch.zeros(shape)),
            r"features: .*\(N, 6\), \(N, L, 6\) or \(N, 6, H, W\), got shape .*num_features=",
        )
        for shape in ((6,), (2, 6, 5), (2, 3, 4, 6))
    ),
    *(
        (
            lambda linear=linear: VEMAttention(6).fold(linear),
            r"linear: expected a torch\.nn\.Linear with 6 inputs, got",
        )
        for linear in (nn.Linear(3, 4), nn.Conv1d(6, 2, 1))
    ),
    *(
        (
            lambda source=source: VarianceRegularizer().attach(source),
            rf"source: expected a VEMAttention or an Emb.* got {type(source).__name__}",
        )
        for source in (head(), nn.Linear(3, 3), VEMAttention(3).statistics)
    ),
    *(
        (lambda given=given: VarianceRegularizer()(torch.zeros(4, 2), features=given), message)
        for given, message in (
            (torch.zeros(4, 3), r"shapes \(4, 3\); pass \(pooled, attention.variance\)"),
            ((torch.zeros(4, 3), torch.zeros(2)), r"shapes \(4, 3\), \(2,\)"),
            ((torch.zeros(4, 3, 2), torch.zeros(4, 3, 2)), "the pair of pooled features"),
        )
    ),
]
HORDE: Refused = [
    (lambda: horde(CONTRASTIVE, reducer=reducers.SumReducer()), r"\(ContrastiveLoss\(reducer="),
    (lambda: horde(CONTRASTIVE, distance=LINEAR), r"distance: .*\(ContrastiveLoss\(distance="),
    (lambda: horde(CONTRASTIVE, order=1), "order: expected at least 2, got 1"),
    (lambda: horde(CONTRASTIVE, order=None), "order: expected at least 2, got None"),
    (
        lambda: horde(CONTRASTIVE, order_weights="max"),
        'order_weights: expected "sum", "mean", a finite number or 3 of them, .* got .max.',
    ),
    (
        lambda: horde(CONTRASTIVE, order_weights=[1.0, math.nan, 1.0]),
        "order_weights: .* got .1.0, nan",
    ),
    (
        lambda: horde(CONTRASTIVE, order_weights=[1.0, 1.0]),
        r"order_weights: .* 3 of them, for orders 2 to 4; got \[1.0, 1.0\]",
    ),
    (lambda: horde("contrastive"), "loss: expected a PML loss, got str"),
    (
        lambda: horde(losses.SelfSupervisedLoss(CONTRASTIVE)),
        "loss: SelfSupervisedLoss takes two sets of embeddings; pass the loss in it",
    ),
    (lambda: horde(horde(CONTRASTIVE)), "HORDELoss reads features itself"),
    (
        lambda: horde(losses.ContrastiveLoss(reducer=reducers.DoNothingReducer())),
        "loss: DoNothingReducer does not return one number; use another",
    ),
    (
        lambda: horde(losses.ArcFaceLoss(3, 5))(X, LABELS, features=MAP),
        r"ArcFaceLoss failed on the vectors \(6, 4\) of order_1 [\s\S]*embedding_size, that must be 4;",
    ),
    (
        lambda: horde(losses.ArcFaceLoss(3, 4))(X, LABELS, features=MAP),
        r"ArcFaceLoss failed on the vectors \(6, 6\) of order_2 [\s\S]*; embed_orders=True makes",
    ),
    (lambda: horde(DistributedLoss(CONTRASTIVE)), "goes around, as in DistributedLoss.HORDELoss"),
    (
        lambda: horde(CONTRASTIVE, embedding_loss=losses.ContrastiveLoss),
        "embedding_loss: expected a PML loss, got type",
    ),
    (
        lambda: horde(CONTRASTIVE, embedding_loss=horde(CONTRASTIVE)),
        "embedding_loss: HORDELoss reads features itself",
    ),
    (
        lambda: horde(CONTRASTIVE)(X[:, :3], LABELS, features=MAP),
        r"embeddings: expected \(N, 4\), got",
    ),
]
MOMENTS: Refused = [
    (lambda: moments(projections="cascade"), "projections: .* cascaded, .* got 'cascade'"),
    (lambda: moments(matmul_dtype="float16"), "matmul_dtype: .* None, bfloat16; got 'float16'"),
    (
        lambda: moments(projections="sketch", matmul_dtype="bfloat16"),
        'matmul_dtype: expected None for projections="sketch", which has no matrix products',
    ),
    (
        lambda: moments()(torch.zeros(2, 5)),
        r'a map .* \(2, 5\), pooled already; .* global_pool="" .* before the pooling$',
    ),
    (lambda: moments()(torch.zeros(2, 4, 3, 3)), r"a map \(N, 5, H, W\) .* pass in_channels="),
    (lambda: moments()(torch.zeros(2, 5, 0, 3)), "at least one position"),
    (lambda: moments()((torch.zeros(2, 4, 5),)), r"pair \(tokens, mask\), got a tuple of 1"),
    (lambda: moments()((torch.zeros(2, 4, 5), MASK)), "boolean mask"),
    (lambda: sketches(), r"tables: expected two or more of one shape .* got \[\]"),
    (lambda: sketches(TABLES[0], TABLES[1].half()), "tables: expected integers, .* torch.float16"),
    (
        lambda: sketches(TABLES[0], TABLES[1].abs().clamp(max=3)),
        "tables: expected integers, each of the channels 1 to 4 once, with either sign",
    ),
]
JOINT_SIMILARITY: Refused = [
    (lambda: JRSRegularizer({}), r"kernels: expected a dict such as .* got \{\}"),
    (
        lambda: JRSRegularizer({"embeddings": torch.exp}),
        "kernels: expected a kernel such as GaussianMixtureKernel.* for embeddings, got",
    ),
    (
        lambda: JRSRegularizer({"a.b": LINEAR}),
        r"kernels: expected names of submodules, got 'a\.b' \(.*\)",
    ),
    (lambda: jrd(similarity_weight=-1.0), "similarity_weight: expected at least 0, got -1.0"),
    (lambda: jrd(representations="pooled"), "representations: expected names"),
    (
        lambda: jrd(representations=["embeddings"], kernels={"pooled": LINEAR}),
        r"representations: expected names, among them those of all kernels \(pooled\)",
    ),
    (lambda: jrd(distance=nn.Identity()), "distance: AM-softmax uses cosines"),
    (
        lambda: jrd()(X, torch.tensor([0, 1, 2, 3, 2, 1]), features=POOLED),
        r"labels: expected 0 to 2 \(num_classes=3\), got 0 to 3; number the classes from 0",
    ),
    (
        lambda: JRDLoss(3, 5)(X, LABELS, features=POOLED),
        r"embeddings: expected \(N, 5\), got .*6, 4",
    ),
    (
        lambda: JRSRegularizer()(X, LABELS, features={"pooled": torch.randn(6, 2, 3, 3)}),
        r"features: expected a matrix \(N, D\) of pooled, got \(6, 2, 3, 3\)",
    ),
    (lambda: LaplaceKernel(math.nan), "bandwidth: .* got nan"),
    (lambda: PolynomialKernel(0), "degree: expected an integer of at least 1, got 0"),
    (lambda: LINEAR(torch.ones(2, 3, 4)), r"x: .* got shape \(2, 3, 4\)"),
]
RANKS: Refused = [
    *(
        (lambda at=at: calculator(recall_at=at), "recall_at: expected integers >= 1, got")
        for at in ((), (0, 1), (1.0,), (True,))
    ),
    (lambda: calculator(("mean_average_precision",)), "Primary metrics must be one or more of"),
    (
        lambda: ranked(X, LABELS[:2]),
        r"query: expected 6 labels, one for each row, got shape \(2,\)",
    ),
    (lambda: ranked(X, LABELS, X / 0, LABELS), "reference: expected finite numbers"),
    *(
        (lambda mask=mask: within(**mask), f"{next(iter(mask))}: expected 4 booleans, got torch")
        for mask in (
            {"queries": torch.ones(3, dtype=torch.bool)},
            {"queries": torch.arange(4)},
            {"references": torch.arange(4)},
        )
    ),
]
ALL = {
    "pairs": PAIRS, "energy confusion": ENERGY_CONFUSION, "ensembles": ENSEMBLES,
    "heads": HEADS, "HORDE": HORDE, "moments": MOMENTS, "joint similarity": JOINT_SIMILARITY,
    "ranks": RANKS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(*refused, id=f"{name} {number}")
        for name, table in ALL.items()
        for number, refused in enumerate(table)
    ],
)
def test_it_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
