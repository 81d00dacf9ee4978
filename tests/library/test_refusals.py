"""Arguments that are out of range, of another kind or of another shape: an error that names them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers
from torch import nn

from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    CosineContrastiveLoss,
    CosinePowersLoss,
    DistributedLoss,
    DivergenceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    EnsembleLoss,
    GradientCache,
    HighOrderMoments,
    HORDELoss,
    JRDLoss,
    JRSRegularizer,
    LaplaceKernel,
    PolynomialKernel,
    PooledFeaturesLoss,
    RankAccuracyCalculator,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
    parameter_groups,
    prepare_loss,
    split_trunk,
)

CONTRASTIVE, LINEAR = losses.ContrastiveLoss(), PolynomialKernel(1, constant=0.0)
MEMORY, SUM = losses.CrossBatchMemory(CONTRASTIVE, 2), losses.MultipleLosses([CONTRASTIVE])
PROXIES, MARGIN = losses.ProxyAnchorLoss(3, 4), losses.MarginLoss(num_classes=2, learn_beta=True)
UNREDUCED = losses.ContrastiveLoss(reducer=reducers.DoNothingReducer())
X, LABELS = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
REGULARIZED = losses.ContrastiveLoss(embedding_regularizer=regularizers.LpRegularizer())
PAIR = (torch.tensor([0]), torch.tensor([1]))
MAP, POOLED = torch.randn(6, 5, 2, 2), torch.rand(6, 5)
MASK = torch.ones(2, 3, dtype=torch.bool)


def head(embedding_size: int | None = 4, **settings: Any) -> EmbeddingHead:
    return EmbeddingHead(5, embedding_size, **settings)


moments = partial(HighOrderMoments, 5, moment_dim=7)
network = partial(AttentionEnsemble, nn.Identity(), nn.Identity(), body_channels=4, num_heads=3)
confusion = EnergyConfusionRegularizer
jrd = partial(JRDLoss, 3, 4)
calculator = partial(RankAccuracyCalculator, device=torch.device("cpu"))
for_trunk = EmbeddingHead.for_trunk


def horde(loss: Any = CONTRASTIVE, **settings: Any) -> HORDELoss:
    return HORDELoss(loss, 5, 4, **{"order": 4, "moment_dim": 6} | settings)


def powers(loss: nn.Module = CONTRASTIVE, **settings: Any) -> CosinePowersLoss:
    return CosinePowersLoss(loss, **settings)


def classes() -> CosinePowersLoss:
    """Powers of a loss that has three classes."""
    return powers(PROXIES, feature_loss=losses.ProxyAnchorLoss(3, 5))


def accuracy(*call: Any, **masks: Any) -> Any:
    within = calculator().get_accuracy_within
    return within(*call, **masks) if masks else calculator().get_accuracy(*call)


REFUSED: list[tuple[Callable[[], object], str]] = [
    # Losses of pairs, and of many processes
    (lambda: BinomialDevianceLoss(alpha=0), "alpha: expected a number above 0, got 0"),
    (lambda: BinomialDevianceLoss(beta=math.nan), "beta: expected a number, got nan"),
    (lambda: CosineContrastiveLoss(neg_margin="0"), "neg_margin: expected a number, got '0'"),
    (lambda: DistributedLoss(None), r"loss: expected a torch\.nn\.Module, got NoneType"),
    (lambda: prepare_loss(object(), CONTRASTIVE), "loss: .* got object; .* prepare_loss"),
    (lambda: DistributedLoss(CONTRASTIVE)(X, LABELS, features=X), "features: .* attach the losses"),
    (lambda: GradientCache(head(), CONTRASTIVE, 0), "chunk_size: .* least 1, got 0"),
    (lambda: GradientCache(head(), CONTRASTIVE, 2.5), "chunk_size: .* got 2.5"),
    (lambda: GradientCache(head, CONTRASTIVE, 2), r"model: .*nn\.Module, got function"),
    # Powers of cosines
    (lambda: powers(powers=[2, 2]), "powers: expected different whole numbers above 0"),
    *(
        (partial(powers, power_weights=w), f"power_weights: .*number .*, or 2 of them, got {w!r}$")
        for w in ("mean", -1, math.inf)
    ),
    (lambda: powers(power_weights=[1]), r"power_weights: .*, or 2 of them, got \[1\]"),
    (lambda: powers(losses.AngularLoss()), "loss: AngularLoss reads vectors, or their lengths"),
    (lambda: powers(losses.SphereFaceLoss(2, 4)), "loss: SphereFaceLoss reads vectors, or their"),
    (lambda: powers(losses.VICRegLoss()), "loss: VICRegLoss fails on a trial batch"),
    (lambda: powers(feature_loss=REGULARIZED), "feature_loss: ContrastiveLoss reads vectors, or"),
    (lambda: powers(losses.ContrastiveLoss(distance=distances.LpDistance(p=1))), "LpDistance"),
    (lambda: PooledFeaturesLoss(losses.AngularLoss(), powers=(1, 3)), "loss: AngularLoss reads"),
    (lambda: powers(feature_loss="contrastive"), "feature_loss: .* got str; pass a PML loss"),
    (lambda: powers()(X, LABELS, features=MAP), r"features: expected pooled .* \(6, 5, 2, 2\)"),
    (lambda: powers(PROXIES)(X, LABELS, features=POOLED), "feature_loss=... takes one as wide as"),
    # Energy confusion
    (lambda: confusion(gradient="trunk"), "gradient: expected one of all, fc; got 'trunk'"),
    *(
        (partial(confusion().attach, source), "source: .* nothing to attach; leave attach")
        for source in (head(), head(None), MEMORY)
    ),
    (lambda: confusion(distance=distances.CosineSimilarity()), "distance: .* got CosineSimilarity"),
    (lambda: confusion()(X[:, :, None], LABELS), "embeddings must be a 2D tensor"),
    (lambda: confusion(gradient="fc")(X, LABELS, features=X[:, :3]), r"features: .* \(n, 4\)"),
    # Ensembles
    (lambda: network(stem_channels=4, embedding_size=7), "embedding_size: .*=3, got 7"),
    (lambda: DivergenceLoss(1), "num_heads: expected a whole number of at least 2, got 1"),
    (lambda: DivergenceLoss(2.5), "num_heads: expected a whole number of at least 2, got 2.5"),
    (lambda: network(stem_channels=4.0, embedding_size=6), "stem_channels: .* whole .* got 4.0"),
    (
        lambda: network(stem_channels=5, embedding_size=6, attention=nn.AvgPool2d(2))(MAP),
        r"attention: .*\(2, 2\), got \(1, 1\)",
    ),
    (lambda: DivergenceLoss(3)(X), r"embeddings: expected \(N, 3 x E\).*got shape \(6, 4\)"),
    (lambda: EnsembleLoss(VarianceRegularizer(), 2), "loss: VarianceRegularizer reads features"),
    (lambda: EnsembleLoss(MEMORY, 2)(X, LABELS, PAIR * 2), "indices_tuple: CrossBatchMemory would"),
    (lambda: EnsembleLoss(SUM, 2)(X, LABELS, ref_emb=X + 1), "ref_emb: MultipleLosses takes none"),
    # Heads and attention
    *(
        (partial(make, None), f"{name}: expected a torch.nn.Module, got NoneType")
        for name, make in (
            ("trunk", partial(for_trunk, embedding_size=4)),
            ("trunk", partial(split_trunk, stage="1")),
            ("trunk", partial(head().extract_features, loader=[])),
            ("stem", partial(AttentionEnsemble, body=LINEAR, stem_channels=4, body_channels=4)),
            ("model", partial(parameter_groups, lr=1.0)),
            ("loss", partial(attach_all, source=head())),
        )
    ),
    (lambda: head(attention="VEM"), "attention: .* got str; pass one, or a callable such as"),
    (lambda: head(pool="token"), "num_prefix_tokens: .* at least 1, got 0"),
    (lambda: head(4.5), "embedding_size: expected a whole number of at least 1, got 4.5"),
    (lambda: for_trunk(nn.Conv2d(3, 4, 1), 4, image="cat.jpg"), "image: .* got str"),
    (lambda: for_trunk(nn.Conv2d(3, 4, 1), 4, image=MAP[0]), r"image: .* got torch.*\(5, 2, 2\)"),
    (lambda: head(None, bias=True), "bias: .* embedding_size=None .* got True; leave it out"),
    (lambda: head(None, init="glorot"), "init: .* got 'glorot'"),
    (lambda: head().fold(), "attention: expected one with .* got NoneType"),
    (lambda: head()(torch.zeros(2, 4, 3, 3)), r"x: expected one axis of 5 .* \(2, 4, 3, 3\)"),
    (lambda: head()([torch.zeros(2, 5, 3, 3)]), "x: expected a trunk's map .* got list; pass"),
    (lambda: head(pool="token", num_prefix_tokens=1)(MAP), 'pool: "token" needs tokens'),
    (lambda: VEMAttention(6)(torch.zeros(6)), r"features: .*\(N, 6, H, W\), .*num_features="),
    (lambda: VEMAttention(6).fold(nn.Conv1d(6, 2, 1)), "linear: .* with 6 inputs, got Conv1d"),
    (lambda: VarianceRegularizer().attach(head()), "source: .* got EmbeddingHead"),
    (lambda: VarianceRegularizer()(X, features=POOLED), r"shapes \(6, 5\); pass \(pooled, att"),
    # HORDE
    (lambda: horde(reducer=reducers.SumReducer()), r"\(ContrastiveLoss\(reducer="),
    (lambda: horde().attach(head(), pool="avg"), "pool: HORDELoss reads feature_map, .* leave it"),
    (lambda: horde(order=None), "order: expected a whole number of at least 2, got None"),
    (lambda: horde(order_weights=[1.0, 1.0]), "order_weights: .*, or 3 of them, got"),
    (lambda: horde(order_weights="max"), "order_weights: .* one of sum, mean; got 'max'"),
    (lambda: horde(losses.SelfSupervisedLoss(CONTRASTIVE)), "SelfSupervisedLoss .* the loss in it"),
    (lambda: horde(UNREDUCED), "loss: DoNothingReducer does not return one number; use another"),
    (lambda: horde(DistributedLoss(CONTRASTIVE)), "goes around, as in DistributedLoss.HORDELoss"),
    (lambda: horde()(X[:, :3], LABELS, features=MAP), r"embeddings: expected \(N, 4\), got"),
    *(
        (partial(loss, *call), told)
        for loss in (horde(), DistributedLoss(CONTRASTIVE), BinomialDevianceLoss())
        for call, told in (
            (({"pooled": X}, LABELS), "embeddings: .* dict; .*output.pooled"),
            ((X, [0, 0, 1, 1, 2, 2]), "labels: expected a tensor, got list"),
        )
    ),
    *(
        (partial(loss, X, LABELS, *call), told)
        for loss in (EnsembleLoss(CONTRASTIVE, 2), BinomialDevianceLoss())
        for call, told in (
            ((PAIR,), r"indices_tuple: expected 3 or 4 tensors, .* got torch.int64 \(1,\), torch"),
            (([[0], [1], [2]],), "indices_tuple: .* got list, list"),
            ((None, LABELS, LABELS), "ref_emb: .* got torch.int64"),
            ((None, X, [0]), "ref_labels:"),
        )
    ),
    *(
        (partial(loss, X, LABELS, features=x.long()), "features: .* floating .* got torch.int64")
        for loss, x in ((horde(), MAP), (powers(), POOLED), (JRSRegularizer(), POOLED))
    ),
    (lambda: horde().split_orders(torch.zeros(3, 21)), r"descriptors: .* \(M, 22\), .* got"),
    (lambda: horde().split_orders(torch.zeros(22)), r"descriptors: .* \(M, 22\), .* got"),
    (lambda: horde(MARGIN)(X, LABELS, features=MAP), "labels: MarginLoss .*=2.*, got 0 to 2"),
    (lambda: horde()(X, LABELS, features=MAP, enqueue_mask=LABELS > 0), "enqueue_mask: .* no loss"),
    *(
        (partial(classes(), X, labels, features=POOLED), f"labels: .*{told}")
        for labels, told in (
            (LABELS.int(), r"got torch.int32; pass labels.long\(\)"),
            (LABELS.bool(), "got torch.bool"),
            (LABELS.float(), "got torch.float32"),
            (LABELS + 1, "got 1 to 3; number"),
            (LABELS - 1, "got -1 to 1; number"),
        )
    ),
    (lambda: horde()(LABELS, X, features=MAP), r"torch\.int64 \(6,\); call loss\(embeddings, lab"),
    (lambda: horde()(X, LABELS, features={"logits": X}), r"pass features=output\.logits"),
    (lambda: horde()(X, LABELS, features=MAP.permute(0, 2, 3, 1)), "feature_map.permute"),
    (
        lambda: horde(PROXIES)(X, LABELS, features=MAP),
        r"\(6, 6\) of order_2 [\s\S]*; embed_orders=",
    ),
    (lambda: EnsembleLoss(MARGIN, 2)(X, LABELS), "labels: MarginLoss .*=2.*, got 0 to 2"),
    # Moments
    (lambda: moments(order=2.5), "order: expected a whole number .* got 2.5"),
    (lambda: moments(moment_dim=2.5), "moment_dim: expected a whole number .* got 2.5"),
    (lambda: moments(projections="cascade"), "projections: .* cascaded, .* got 'cascade'"),
    (lambda: moments(matmul_dtype="float16"), "matmul_dtype: .* None, bfloat16; got 'float16'"),
    (lambda: moments(matmul_dtype="bfloat16"), "matmul_dtype: .* no matrix"),
    (lambda: moments(init="rademacher"), "init: .*\"sketch\" trains none, got 'rademacher'"),
    (lambda: moments()(POOLED), r'\(6, 5\), pooled already; .* global_pool="" .* before the'),
    (lambda: moments()(torch.zeros(2, 4, 3, 3)), r"a map \(N, 5, H, W\) .* pass in_channels="),
    (lambda: moments()(torch.zeros(2, 5, 0, 3)), "at least one position"),
    (lambda: moments()((torch.zeros(2, 4, 5),)), r"pair \(tokens, mask\), got a tuple of 1"),
    (lambda: moments()((torch.zeros(2, 4, 5), MASK)), "boolean mask"),
    (lambda: moments().to("meta")(MAP), "HighOrderMoments: on the meta device; call to_empty and"),
    # Joint similarity
    (lambda: JRSRegularizer({}), r"kernels: expected a dict such as .* got \{\}"),
    (lambda: JRSRegularizer({"embeddings": torch.exp}), "kernels: .* got {'embeddings': <built-in"),
    (lambda: JRSRegularizer({"a.b": LINEAR}), r"kernels: .* submodules, got 'a\.b' \(.*\)"),
    (lambda: jrd(similarity_weight=-1.0), "similarity_weight: .* of at least 0, got -1.0"),
    (lambda: jrd(representations="pooled"), "representations: expected names"),
    (lambda: jrd(representations=["classes"], kernels={"a": LINEAR}), r"representations: .*\(a\)"),
    (lambda: jrd(distance=nn.Identity()), "distance: JRDLoss has no use for one"),
    (lambda: JRSRegularizer(distance=nn.Identity()), "distance: JRSRegularizer has no use for one"),
    (lambda: jrd()(X, LABELS + 1, features=POOLED), r"labels: .*num_classes=3\), got 1 to 3"),
    (lambda: jrd()(X, LABELS / 2, features=POOLED), "labels: JRDLoss .* got torch.float32; pass"),
    (lambda: JRDLoss(3, 5)(X, LABELS, features=POOLED), r"embeddings: .*\(N, 5\), got .*6, 4"),
    (lambda: JRSRegularizer()(X, LABELS, features={"pooled": MAP}), "features: .* pooled, got"),
    (lambda: LaplaceKernel(math.nan), "bandwidth: .* got nan"),
    (lambda: PolynomialKernel(0), "degree: expected a whole number of at least 1, got 0"),
    (lambda: PolynomialKernel(constant=-1), "constant: expected a number of at least 0, got -1"),
    (lambda: LINEAR(torch.ones(2, 3, 4)), r"x: .* got shape \(2, 3, 4\)"),
    # Ranks
    (lambda: calculator(recall_at=(0, 1)), "recall_at: expected integers >= 1, got"),
    (lambda: calculator(recall_at=5), "recall_at: expected integers >= 1, got"),
    (lambda: calculator(k=0), 'k: expected an integer >= 1, "max_bin_count" or None, got 0'),
    (lambda: calculator(knn_func=torch.cdist), "knn_func: .* without a search; leave it out"),
    (lambda: calculator(label_comparison_fn=torch.eq), "label_comparison_fn: ranks are counted by"),
    (
        lambda: calculator(["r_precision"], k=1).get_accuracy(X, LABELS * 0),
        "k: .* least 5, .* got 1",
    ),
    (lambda: accuracy(X[:0], LABELS[:0]), r"query: .* at least one row .* \(0, 4\)"),
    (lambda: accuracy(X, LABELS, X), "reference_labels: expected numbers, .* got NoneType"),
    (lambda: accuracy(X, LABELS, X[:, :3], LABELS), "reference: .* as wide .* 4, got 3"),
    (lambda: accuracy(X, LABELS[:2]), r"query: expected 6 labels, .* got shape \(2,\)"),
    (lambda: accuracy(X, LABELS, X / 0, LABELS), "reference: expected finite numbers"),
    (lambda: accuracy(X, LABELS, queries=LABELS), "queries: expected 6 booleans, got torch"),
    (lambda: accuracy(X, LABELS, groups=LABELS[:2]), r"groups: expected 6 integers, .* \(2,\)"),
    (lambda: calculator(group_rule="camera"), "group_rule: expected one of class, all; got 'cam"),
    (
        lambda: calculator().get_accuracy(X, LABELS, X, LABELS, query_groups=LABELS),
        "query_groups, reference_groups: .* got one",
    ),
]


@pytest.mark.parametrize("make", [horde, BinomialDevianceLoss, LaplaceKernel, VarianceRegularizer])
def test_an_unknown_argument_is_named_with_our_class(make: Any) -> None:
    name = getattr(make, "__name__", "").replace("horde", "HORDELoss")
    with pytest.raises(TypeError, match=f"^{name}: .* argument 'orders'; it takes .*, kwargs: see"):
        make(orders=3)


@pytest.mark.filterwarnings("ignore:__array_wrap__")  # of PML's SphereFaceLoss, by new NumPy
@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_it_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
