"""Facts about losses, for `paper_facts.py`: read from their classes and arguments."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytorch_metric_learning.reducers import SumReducer
from torch import Tensor, nn

from benchmarks.building.network import EmbeddingModel
from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    DistributedLoss,
    EnergyConfusionRegularizer,
    ExponentialKernel,
    GaussianMixtureKernel,
    HORDELoss,
    IntraClassRegularizer,
    JRDLoss,
    LaplaceKernel,
    PolynomialKernel,
    VarianceRegularizer,
    VEMAttention,
)

METRIC_LOSSES = {
    "CosineContrastiveLoss": "contrastive",
    "TripletMarginLoss": "triplet",
    "BinomialDevianceLoss": "binomial deviance",
    "DenseNPairsLoss": "N-pair",
    "MarginLoss": "margin",
    "JRDLoss": "AM-softmax",
}
REGULARIZERS = {
    "EnergyConfusionRegularizer": "energy confusion",
    "VarianceRegularizer": "variance attention",
    "IntraClassRegularizer": "distances within classes",
}
JOINT = {"jrs": "JRS", "jmmd": "JMMD", "jintra": "JIntra"}
REDUCERS = {
    "SumReducer": "sum",
    "MeanReducer": "mean",
    "DivisorReducer": "mean",
    "AvgNonZeroReducer": "mean over active",
}


@dataclass
class Objective:
    """A network with its loss."""

    network: EmbeddingModel
    loss: DistributedLoss

    def facts(self) -> dict[str, Any]:
        return self._metric_loss() | self._regularizer() | {"gradients": self._gradients()}

    @cached_property
    def terms(self) -> list[tuple[nn.Module, float]]:
        """Losses and their weights; the first one holds the metric loss."""
        loss = self.loss.loss
        if not hasattr(loss, "weights"):
            return [(loss, 1.0)]
        return [(part, loss.weights[name]) for name, part in loss.losses.items()]

    @cached_property
    def metric(self) -> nn.Module:
        """The metric loss on the network's embeddings."""
        first, _ = self.terms[0]
        while isinstance(first, HORDELoss) or type(first).__name__ == "EnsembleLoss":
            first = next(iter(first.losses.values()))
        return first

    @property
    def head(self) -> nn.Module:
        """Pooling and the embedding's linear layer."""
        head = self.network.head
        return head.head if isinstance(head, AttentionEnsemble) else head

    def length_seen(self, loss: nn.Module) -> str:
        """The length of embeddings in a loss, which may normalise them itself."""
        own = isinstance(loss, JRDLoss) or loss.distance.normalize_embeddings
        return "unit" if own or self.head.normalize else "raw"

    def _metric_loss(self) -> dict[str, Any]:
        loss = self.metric
        found: dict[str, Any] = {"loss": METRIC_LOSSES[type(loss).__name__]}
        if isinstance(loss, JRDLoss):
            W = loss.metric.W
            return found | {
                "loss_scale": loss.metric.scale,
                "loss_margin": loss.metric.margin,
                "loss_similarity": "cosine",
                "loss_reduction": REDUCERS[type(loss.metric.reducer).__name__],
                "class_weight_start": start(W, W.shape[1], W.shape[0]),
            }
        squared = getattr(loss.distance, "power", 1) == 2
        found["loss_similarity"] = {
            "CosineSimilarity": "cosine",
            "DotProductSimilarity": "inner product",
            "LpDistance": "squared euclidean" if squared else "euclidean",
        }[type(loss.distance).__name__]
        [reducer] = {
            REDUCERS[type(one).__name__]
            for one in getattr(loss.reducer, "reducers", {"loss": loss.reducer}).values()
        }
        match found["loss"]:
            case "contrastive":
                found["loss_margin"] = loss.neg_margin
                reducer = "mean of positives, mean of active negatives"
            case "triplet":
                found["loss_margin"] = loss.margin
            case "margin":
                found["loss_margin"] = loss.margin
                found["loss_beta"] = round(loss.beta.item(), 6)
                found["beta_trained"] = loss.beta.requires_grad
            case "binomial deviance":
                assert isinstance(loss, BinomialDevianceLoss)
                found |= {"loss_alpha": loss.alpha, "loss_beta": loss.beta}
                found["loss_C"] = loss.negative_weight
                if loss.balanced:
                    reducer += " of anchors' means"
        return found | {"loss_reduction": reducer} | self._mining()

    def _mining(self) -> dict[str, Any]:
        miner = self.loss.miner
        match type(miner).__name__:
            case "NoneType":
                return {"mining": "all"}
            case "DistanceWeightedMiner":
                cutoffs = [miner.cutoff, miner.nonzero_loss_cutoff]
                return {"mining": "distance weighted", "mining_cutoffs": cutoffs}
            case "BatchEasyHardMiner":
                return {"mining": {"semihard": "semihard", "hard": "hardest"}[miner.neg_strategy]}
            case other:
                return {"mining": other}

    def _regularizer(self) -> dict[str, Any]:
        found: dict[str, Any] = {"regularizer": "none"}
        [(first, weight), *others] = self.terms
        assert weight == 1
        for part, weight in others:
            found |= {"regularizer": REGULARIZERS[type(part).__name__], "weight": weight}
            if isinstance(part, IntraClassRegularizer):
                found["intra_class_form"] = _intra_class(part)
            elif isinstance(part, EnergyConfusionRegularizer):
                found |= _confusion(part) | {"confusion_norm": self.length_seen(part)}
            elif isinstance(part, VarianceRegularizer):
                found["variance_loss"] = "mean of squares"
                found["variance_form"] = "1/(N-1)" if part.unbiased else "1/N"
        attention = getattr(self.network.head, "attention", None)
        if isinstance(attention, VEMAttention):
            pooled = attention.num_features == self.head.in_channels
            found |= {
                "attention_size": "pooled channels" if pooled else "another",
                "vem_start": start(attention.variance, 1, 1),
                "attention_gate": "sigmoid",
            }
        elif isinstance(attention, nn.Dropout):
            found |= {"regularizer": "dropout", "dropout_ratio": attention.p}
        if isinstance(first, HORDELoss):
            found |= self._horde(first)
        elif isinstance(first, JRDLoss) and first.similarity_weight > 0:
            found |= _joint(first)
        return found

    def _horde(self, horde: HORDELoss) -> dict[str, Any]:
        moments = horde.moments
        trained = any(p.requires_grad for p in moments.parameters())
        drawn = next(iter([*moments.parameters(), *moments.buffers()]))
        fans: tuple[int, ...] = drawn.shape
        if moments.projections == "sketch":  # signed channels, from 1
            drawn, fans = drawn[drawn != 0].sign(), (1, 1)
        kind: Any = {"cascaded": "cascade"}.get(moments.projections, moments.projections)
        if horde.order == 2 and trained:  # order 2 alone: the same two matrices
            kind = OneOf(["cascade", "independent"])
        convolved = moments.projections == "sketch"
        found: dict[str, Any] = {
            "regularizer": "HORDE",
            "orders": horde.order,
            "moment_size": moments.moment_dim,
            "moment_form": f"{'convolutions' if convolved else 'products'} of projections, averaged over positions",
            "projections": kind if trained else "fixed",
            "projections_trained": trained,
            "projection_start": start(drawn, *fans),
            "order_embedding_size": "none",
            "order_norm": "unit" if horde.normalize else "raw",
        }
        for layer in horde.embeddings.values():
            if isinstance(layer, nn.Linear):
                found["order_embedding_size"] = layer.out_features
                found["order_embedding_start"] = start(
                    layer.weight, layer.in_features, layer.out_features
                )
        [found["order_weights"]] = {*horde.order_weights}
        _, *orders = horde.losses.values()
        same = all(type(loss) is type(self.metric) for loss in orders)
        found["order_losses"] = "the metric loss" if same else "another"
        return found

    def _gradients(self) -> dict[str, Any]:
        """Parts that the gradient of each loss reaches, in the order of the data's way."""
        (first, _), *others = self.terms
        head = self.network.head
        masks = ["attention"] * isinstance(head, AttentionEnsemble)  # of the map that HORDE reads
        attention = masks or ["attention"] * isinstance(head.attention, VEMAttention)
        jrd = isinstance(first, JRDLoss)
        found = {"metric": ["trunk", "head", *attention, *["class weights"] * jrd]}
        if isinstance(first, HORDELoss):
            trained = any(p.requires_grad for p in first.moments.parameters())
            found["HORDE"] = ["trunk", *masks, *["projections"] * trained]
        elif jrd and first.similarity_weight > 0:
            reached = {"pooled": ["trunk"], "embeddings": ["trunk", "head"]}
            reached["classes"] = ["trunk", "head", "class weights"]
            parts = {part for name in first.kernels for part in reached[name]}
            found[JOINT[first.regularizer]] = sorted(parts, key=[*reached["classes"]].index)
        for part, _ in others:
            match part:
                case EnergyConfusionRegularizer():
                    whole = ["trunk", "head"]
                    found["energy confusion"] = ["head"] if part.gradient == "fc" else whole
                case VarianceRegularizer():
                    found["variance"] = [*["trunk"] * (not part.detach_features), "attention"]
                case IntraClassRegularizer():
                    found["distances within classes"] = ["trunk", "head"]
        return found


def start(weight: Tensor, fan_in: int, fan_out: int) -> Any:
    """The distribution that weights are drawn from, recognised by their largest value and their mean square."""
    values = weight.detach().float().flatten()[:200_000]
    largest, size = values.abs().max().item(), values.square().mean().sqrt().item()
    if largest == 0:
        return "zeros"
    name = f"normal {size:.1f}"
    if values.unique().numel() == 2 and abs(largest - size) < 1e-6:
        name = "signs"
    elif abs(size * math.sqrt(3) / largest - 1) < 0.03:
        name = f"uniform {largest:.3g}"
        for known, bound in (
            ("glorot uniform", math.sqrt(6 / (fan_in + fan_out))),
            ("uniform 1/sqrt(in)", 1 / math.sqrt(fan_in)),
        ):
            if 0.98 * bound < largest <= bound * (1 + 1e-6):
                name = known
    return OneOf([name, "random"])


def _confusion(part: EnergyConfusionRegularizer) -> dict[str, Any]:
    summed = isinstance(part.reducer, SumReducer)
    energy = "log(1 + L)" if part.log else "L"
    return {
        "confusion_form": f"{energy} per pair, {'summed' if summed else 'averaged'}",
        "confusion_pairs": "ordered, all" if summed else "all",
    }


def _intra_class(part: IntraClassRegularizer) -> str:
    kernel = part.kernels["embeddings"]
    printed = (kernel.components, kernel.bandwidth, kernel.normalize) == (1, 2, True)
    words = "exp(-d^2 / 2), averaged over a class's pairs, summed over classes"
    return words if printed and len(part.kernels) == 1 else "another"


def _joint(loss: JRDLoss) -> dict[str, Any]:
    kernels = dict(loss.kernels)
    found = {
        "regularizer": JOINT[loss.regularizer],
        "weight": loss.similarity_weight,
        "representations": list(kernels),
        "kernels": {name: _kernel(kernel) for name, kernel in kernels.items()},
    }
    if "pooled" in kernels:
        found["pooled_norm"] = "unit" if kernels["pooled"].normalize else "raw"
    bandwidth = getattr(kernels["embeddings"], "bandwidth", "none")
    if bandwidth != "none":
        assert bandwidth is None
        laplace = isinstance(kernels["embeddings"], LaplaceKernel)
        found["bandwidth"] = "mean L1 distance" if laplace else "mean squared distance"
    return found


def _kernel(kernel: nn.Module) -> str:
    match kernel:
        case GaussianMixtureKernel():
            return f"{kernel.components} Gaussians"
        case LaplaceKernel():
            return "Laplace"
        case PolynomialKernel():
            return f"(x.x' + {kernel.constant:g})^{kernel.degree}"
        case ExponentialKernel():
            return "exp(x.x')"
        case _:
            return type(kernel).__name__


@dataclass(frozen=True)
class OneOf:
    """Equal to each of several words."""

    words: list[str]

    def __eq__(self, said: object) -> bool:
        return said in self.words
