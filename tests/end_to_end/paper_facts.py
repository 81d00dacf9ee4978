"""Facts that a paper states about a training, read from the classes that the runner builds and their arguments.

The names are those of `references/settings.yaml`. What is the same in every recipe, such as the start of the
weights, is not read. That a class computes its equation is for the tests of the library.
"""

import math
from itertools import chain
from typing import Any

import torch
from torch import nn

from benchmarks.building.network import EmbeddingModel, batch_norms
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.settings.experiment import Data, Experiment
from pml_regularizers import AttentionEnsemble, DistributedLoss, HORDELoss

BACKBONES = {"googlenet": "GoogLeNet", "bn_inception": "BN-Inception", "resnet50": "ResNet-50"}
LOSSES = {
    "CosineContrastiveLoss": "contrastive",
    "TripletMarginLoss": "triplet",
    "BinomialDevianceLoss": "binomial deviance",
    "DenseNPairsLoss": "N-pair",
    "MarginLoss": "margin",
    "JRDLoss": "AM-softmax",
    "EnergyConfusionRegularizer": "energy confusion",
    "VarianceRegularizer": "variance attention",
    "IntraClassRegularizer": "distances within classes",
}
JOINT = {"jrs": "JRS", "jmmd": "JMMD", "jintra": "JIntra"}
REDUCERS = {"SumReducer": "sum", "AvgNonZeroReducer": "mean over active"}
REDUCERS |= dict.fromkeys(("MeanReducer", "DivisorReducer"), "mean")
SIMILARITIES = {
    ("CosineSimilarity", 1): "cosine",
    ("DotProductSimilarity", 1): "inner product",
    ("LpDistance", 1): "euclidean",
    ("LpDistance", 2): "squared euclidean",
}
KERNELS = {
    "GaussianKernel": "{0.components} Gaussians",
    "GaussianMixtureKernel": "{0.components} Gaussians",
    "LaplaceKernel": "Laplace",
    "PolynomialKernel": "(x.x' + {0.constant:g})^{0.degree}",
    "ExponentialKernel": "exp(x.x')",
}
INTRA_CLASS = "exp(-d^2 / 2), averaged over a class's pairs, summed over classes"


def facts(
    experiment: Experiment,
    network: EmbeddingModel,
    loss: DistributedLoss,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> dict[str, Any]:
    """All facts of a training, as the runner builds it, that depend on its recipe."""
    data, evaluation = experiment.data, experiment.evaluation
    whole = (data.split, data.train_classes, data.max_classes) == ("test", None, None)
    head = network.head.head if isinstance(network.head, AttentionEnsemble) else network.head
    terms = [(loss.loss, 1.0)]
    if hasattr(loss.loss, "weights"):
        terms = [(part, loss.loss.weights[name]) for name, part in loss.loss.losses.items()]
    (metric, weight), *others = terms
    assert weight == 1
    found = {
        "backbone": BACKBONES[experiment.model.trunk.partition(".")[0]],
        "embedding_size": network.head.embedding_size,
        "pooling": {"avg": "average"}.get(head.pool, "another"),
        "head_bias": head.fc.bias is not None,
        "curve_steps": evaluation.every,
        "split": "published" if whole else "another",
        "selection": "last" if experiment.protocol == "paper" else "best on validation",
        **({"parts": evaluation.parts} if evaluation.parts else {}),
        "regularizer": "none",
        **(_horde(metric) if isinstance(metric, HORDELoss) else {}),
        **_batch_norm(network),
        **_images(data),
        **_optimization(experiment, [network, loss], optimizer),
        **_schedule(experiment, scheduler),
        **_mining(loss.miner),
    }
    while isinstance(metric, HORDELoss) or type(metric).__name__ == "EnsembleLoss":
        metric = next(iter(metric.losses.values()))
    found |= _metric_loss(metric) | {"embedding_norm": _length(metric, head)}
    attention = getattr(network.head, "attention", None)
    if isinstance(attention, nn.Dropout):
        found |= {"regularizer": "dropout", "dropout_ratio": attention.p}
    for part, weight in others:
        found |= {"regularizer": LOSSES[type(part).__name__], "weight": weight}
        found |= _regularizer(part, head)
    return found


def _length(loss: nn.Module, head: nn.Module) -> str:
    """The length of embeddings in a loss, which may normalise them itself."""
    own = type(loss).__name__ == "JRDLoss" or loss.distance.normalize_embeddings
    return "unit" if own or head.normalize else "raw"


def _batch_norm(network: EmbeddingModel) -> dict[str, str]:
    parts: list[nn.Module] = [network.trunk, getattr(network.head, "body", nn.Identity())]
    norms = batch_norms(nn.ModuleList(parts))
    network.train()
    states = {(norm.training, p.requires_grad) for norm in norms for p in norm.parameters()}
    words = {(True, True): "trained", (False, True): "statistics frozen", (False, False): "frozen"}
    if not states:
        return {}
    [state] = states
    return {"batch_norm": words[state]}


def _images(data: Data) -> dict[str, Any]:
    """Batches, and the views of an image."""
    assert data.image_size is not None
    layout, whole = "random", data.augmentation == "multi_resolution"
    if data.samples_per_class:
        layout = f"{data.batch_size // data.samples_per_class} x {data.samples_per_class}"
    side = data.resize or round(data.image_size / (1 if whole else 0.875))
    resized = f"shorter side {side}" if data.keep_aspect else f"{side} x {side}"
    uncut = side == data.image_size and not data.keep_aspect
    train_resize, train_crop = {
        "multi_resolution": ("0.8 to 1.8 x crop", "random"),
        "random_crop": (resized, "random"),
        "random_resized_crop": ("none", "random resized"),
    }[data.augmentation]
    found = {"batch_size": data.batch_size, "batch_layout": layout}
    found |= {"train_size": data.image_size, "test_size": data.image_size}
    found |= {"train_resize": train_resize, "train_crop": train_crop}
    return found | {"test_resize": resized, "test_crop": "none" if uncut else "center"}


def _optimization(
    experiment: Experiment, modules: list[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    groups = optimizer.param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    of_part: dict[str, set[float]] = {}
    named = (module.named_parameters(prefix=f"{i}") for i, module in enumerate(modules))
    for name, p in chain.from_iterable(named):
        if p.requires_grad:
            of_part.setdefault(_part(name), set()).add(rates[id(p)])
    found: dict[str, Any] = {f"lr_{part}": rate for part, [rate] in of_part.items()}
    [found["weight_decay"]] = {group["weight_decay"] for group in groups}
    [found["optimizer_eps"]] = {group["eps"] for group in groups}
    if found["weight_decay"] != 0:
        decoupled = optimizer.defaults["decoupled_weight_decay"]
        found["weight_decay_form"] = "decoupled" if decoupled else "in the gradient"
    return found | {"optimizer": type(optimizer).__name__}


def _part(name: str) -> str:
    """The part of the network (0), or the loss (1), that a parameter belongs to, by its name."""
    if name.startswith("1."):
        return "loss"
    if name.startswith("0.head.attention"):
        return "attention"
    return "head" if name.startswith("0.head") and "fc." in name else "trunk"


def _schedule(experiment: Experiment, scheduler: Any) -> dict[str, Any]:
    data, steps = experiment.data, experiment.optimization.steps
    epoch = IMAGE_DATASETS[data.dataset].counts["train"][0] / data.batch_size
    epochs, lengths = round(steps / epoch), [f"{steps} steps"]
    if steps in (_steps(epochs * epoch), epochs * _steps(epoch)):
        lengths.append(f"{epochs} epochs")
    found = {"length": OneOf(lengths), "schedule": "constant"}
    if scheduler is not None:
        first, *_ = falls = sorted(scheduler.milestones)
        every = round(first / epoch)
        assert falls == [_steps(k * every * epoch) for k in range(1, len(falls) + 1)]
        assert _steps((len(falls) + 1) * every * epoch) >= steps
        found["schedule"] = f"x {scheduler.gamma:g} every {every} epochs"
    return found


def _steps(batches: float) -> int:
    """Steps that hold so many batches; 8054.0000001 are 8054."""
    return math.ceil(round(batches, 6))


def _metric_loss(loss: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": LOSSES[type(loss).__name__]}
    if found["loss"] == "AM-softmax":
        softmax = loss.metric
        found |= {"loss_scale": softmax.scale, "loss_margin": softmax.margin}
        found["loss_reduction"] = REDUCERS[type(softmax.reducer).__name__]
        return found | (_joint(loss) if loss.similarity_weight > 0 else {})
    power = getattr(loss.distance, "power", 1)
    found["loss_similarity"] = SIMILARITIES[type(loss.distance).__name__, power]
    several = getattr(loss.reducer, "reducers", {"loss": loss.reducer})
    [reducer] = {REDUCERS[type(one).__name__] for one in several.values()}
    match found["loss"]:
        case "contrastive":
            found["loss_margin"] = loss.neg_margin
            reducer = "mean of positives, mean of active negatives"
        case "triplet":
            found["loss_margin"] = loss.margin
        case "margin":
            found |= {"loss_margin": loss.margin, "loss_beta": round(loss.beta.item(), 6)}
            found["beta_trained"] = loss.beta.requires_grad
        case "binomial deviance":
            found |= {"loss_alpha": loss.alpha, "loss_beta": loss.beta}
            found["loss_C"] = loss.negative_weight
            reducer += " of anchors' means" if loss.balanced else ""
    return found | {"loss_reduction": reducer}


def _mining(miner: Any) -> dict[str, Any]:
    name = type(miner).__name__
    if name == "DistanceWeightedMiner":
        cutoffs = [miner.cutoff, miner.nonzero_loss_cutoff]
        return {"mining": "distance weighted", "mining_cutoffs": cutoffs}
    if name == "BatchEasyHardMiner":
        return {"mining": {"semihard": "semihard", "hard": "hardest"}[miner.neg_strategy]}
    return {"mining": "all" if miner is None else name}


def _horde(horde: HORDELoss) -> dict[str, Any]:
    moments, layers = horde.moments, [*horde.embeddings.values()]
    trained = any(p.requires_grad for p in moments.parameters())
    kind: Any = {"cascaded": "cascade"}.get(moments.projections, moments.projections)
    if horde.order == 2:  # order 2 alone: the same two matrices
        kind = OneOf(["cascade", "independent"])
    found = {
        "regularizer": "HORDE",
        "orders": horde.order,
        "moment_size": moments.moment_dim,
        "projections": kind if trained else "fixed",
        "projections_trained": trained,
        "order_norm": "unit" if horde.normalize else "raw",
    }
    [found["order_embedding_size"]] = {getattr(of, "out_features", "none") for of in layers}
    [found["order_weights"]] = {*horde.order_weights}
    return found


def _regularizer(part: Any, head: nn.Module) -> dict[str, Any]:
    gradients = {"metric": ["trunk", "head"]}
    match type(part).__name__:
        case "EnergyConfusionRegularizer":
            gradients["energy confusion"] = ["trunk", "head"][part.gradient == "fc" :]
            summed = type(part.reducer).__name__ == "SumReducer"
            energy = "log(1 + L)" if part.log else "L"
            form = f"{energy} per pair, {'summed' if summed else 'averaged'}"
            found = {"confusion_form": form, "confusion_norm": _length(part, head)}
            return found | {"gradients": gradients}
        case "VarianceRegularizer":
            gradients["metric"].append("attention")
            gradients["variance"] = ["trunk"] * (not part.detach_features) + ["attention"]
            return {"gradients": gradients, "variance_form": "1/(N-1)" if part.unbiased else "1/N"}
        case _:
            [kernel] = part.kernels.values()
            assert (kernel.components, kernel.bandwidth, kernel.normalize) == (1, 2, True)
            return {"intra_class_form": INTRA_CLASS}


def _joint(loss: Any) -> dict[str, Any]:
    kernels = dict(loss.kernels)
    found = {
        "regularizer": JOINT[loss.regularizer],
        "weight": loss.similarity_weight,
        "representations": list(kernels),
        "kernels": {name: KERNELS[type(of).__name__].format(of) for name, of in kernels.items()},
    }
    if "pooled" in kernels:
        found["pooled_norm"] = "unit" if kernels["pooled"].normalize else "raw"
    if getattr(kernels["embeddings"], "bandwidth", "none") is None:
        laplace = found["kernels"]["embeddings"] == "Laplace"
        found["bandwidth"] = "mean L1 distance" if laplace else "mean squared distance"
    return found


class OneOf:
    """Equal to each of several words."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __eq__(self, said: object) -> bool:
        return said in self.words
