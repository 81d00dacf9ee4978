"""Facts that a paper would state about a training, read from the objects that the runner builds.

The names are those of `references/settings.yaml`. Networks have their real sizes and see images of 64 pixels.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.building.images import Datasets
from benchmarks.building.network import EmbeddingModel, batch_norms
from benchmarks.datasets import IMAGE_DATASETS, ImageSet
from benchmarks.evaluation.outputs import over_parts
from benchmarks.evaluation.tester import cluster_metrics, measure
from benchmarks.settings.experiment import Evaluation, Experiment
from benchmarks.training.batches import StepSampler
from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    DistributedLoss,
    EnergyConfusionRegularizer,
    HORDELoss,
    IntraClassRegularizer,
    JRDLoss,
    VEMAttention,
)
from pml_regularizers.feature_loss import FeatureLoss

# Convolutions, whether some are followed by batch norm, pooled channels.
BACKBONES = {
    (57, False, 1024): "GoogLeNet",
    (69, True, 1024): "BN-Inception",
    (53, True, 2048): "ResNet-50",
}
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
REDUCERS = {
    "SumReducer": "sum",
    "MeanReducer": "mean",
    "DivisorReducer": "mean",
    "AvgNonZeroReducer": "mean over active",
}
WIDTH, HEIGHT = 400, 300
"""Size of the picture that views are made of."""


@dataclass
class Training:
    """An entry as the runner builds it."""

    experiment: Experiment
    network: EmbeddingModel
    loss: DistributedLoss
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    datasets: Datasets
    starts_from_imagenet: bool
    """Initial weights by the settings; the weights themselves are not loaded."""

    def facts(self) -> dict[str, Any]:
        """Everything that can be read; where a paper's words leave room, a test of these words."""
        found: dict[str, Any] = {}
        for read in (
            *(self._network, self._metric_loss, self._regularizer, self._gradients, self._batch),
            *(self._views, self._optimization, self._test),
        ):
            found |= read()
        return found

    # ------------------------------------------------------------------------------------ network

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

    def _images(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(8, 3, 64, 64, generator=generator)
        return images, torch.arange(8) // 2

    def _network(self) -> dict[str, Any]:
        parts: list[nn.Module] = [self.network.trunk]
        if isinstance(self.network.head, AttentionEnsemble):
            parts.append(self.network.head.body)
        modules = [module for part in parts for module in part.modules()]
        norms = batch_norms(nn.ModuleList(parts))
        kind = sum(isinstance(m, nn.Conv2d) for m in modules), bool(norms), self.head.in_channels
        seen: list[Tensor] = []
        with torch.no_grad():
            taps = [
                place.register_forward_hook(lambda *call: seen.append(call[2]))
                for place in (self.head.feature_map, self.head.pooled)
            ]
            embeddings = self.network.eval()(self._images()[0])
            self.network.train()
        for tap in taps:
            tap.remove()
        feature_map, pooled = seen
        found = {
            "backbone": BACKBONES[kind],
            "pretrained": "ImageNet" if self.starts_from_imagenet else "nothing",
            "framework": type(self.optimizer).__module__.partition(".")[0],
            "embedding_size": embeddings.shape[1],
            "embedding_norm": self._length_seen(self.metric, embeddings),
            "pooling": "average"
            if torch.allclose(pooled, feature_map.mean(dim=(2, 3)), rtol=1e-4)
            else "another",
            "head_layers": sum(isinstance(m, nn.Linear) for m in self.head.modules()),
            "head_bias": self.head.fc.bias is not None,
            "head_start": start(
                self.head.fc.weight, self.head.in_channels, self.head.fc.out_features
            ),
        }
        if norms:
            trained = [p.requires_grad for norm in norms for p in norm.parameters()]
            frozen = not any(norm.training for norm in norms)
            assert len({*trained}) == len({norm.training for norm in norms}) == 1
            found["batch_norm"] = {
                (False, True): "trained",
                (True, True): "statistics frozen",
                (True, False): "frozen",
            }[frozen, trained[0]]
        return found

    def _length_seen(self, loss: nn.Module, embeddings: Tensor) -> str:
        """The length of embeddings in a loss, which may normalise them itself."""
        if torch.allclose(embeddings.norm(dim=1), torch.ones(len(embeddings))):
            return "unit"
        _, labels = self._images()
        options = {"features": embeddings} if isinstance(loss, FeatureLoss) else {}
        doubled = {name: 2 * value for name, value in options.items()}
        same = torch.allclose(
            loss(embeddings, labels, **options), loss(2 * embeddings, labels, **doubled)
        )
        return "unit" if same else "raw"

    # --------------------------------------------------------------------------------------- loss

    def _metric_loss(self) -> dict[str, Any]:
        loss, distance = self.metric, getattr(self.metric, "distance", None)
        name = METRIC_LOSSES[type(loss).__name__]
        found: dict[str, Any] = {"loss": name}
        if isinstance(loss, JRDLoss):
            found |= {
                "loss_scale": loss.metric.scale,
                "loss_margin": loss.metric.margin,
                "loss_similarity": "cosine",
                "loss_reduction": REDUCERS[type(loss.metric.reducer).__name__],
                "class_weight_start": start(
                    loss.metric.W, loss.metric.W.shape[1], loss.metric.W.shape[0]
                ),
            }
            return found | {"loss": self._if_it_computes(found)}
        squared = getattr(distance, "power", 1) == 2
        kind = {
            "CosineSimilarity": "cosine",
            "DotProductSimilarity": "inner product",
            "LpDistance": "squared euclidean" if squared else "euclidean",
        }[type(distance).__name__]
        found["loss_similarity"] = kind
        [reducer] = {
            REDUCERS[type(one).__name__]
            for one in getattr(loss.reducer, "reducers", {"loss": loss.reducer}).values()
        }
        match name:
            case "contrastive":
                found["loss_margin"] = loss.neg_margin
                reducer = "mean of positives, mean of active negatives"
            case "triplet" | "margin":
                found["loss_margin"] = loss.margin
            case "binomial deviance":
                assert isinstance(loss, BinomialDevianceLoss)
                found |= {
                    "loss_alpha": loss.alpha,
                    "loss_beta": loss.beta,
                    "loss_C": loss.negative_weight,
                }
                if loss.balanced:
                    reducer += " of anchors' means"
        if name == "margin":
            found |= {
                "loss_beta": round(loss.beta.item(), 6),
                "beta_trained": loss.beta.requires_grad,
            }
        found |= {"loss_reduction": reducer, "mining": self._mining()}
        if found["mining"] == "distance weighted":
            miner = self.loss.miner
            found["mining_cutoffs"] = [miner.cutoff, miner.nonzero_loss_cutoff]
        return found | {"loss": self._if_it_computes(found)}

    def _if_it_computes(self, found: Mapping[str, Any]) -> str:
        """The loss's name, where its value is that of the name's equation with what was found."""
        loss, labels = self.metric, torch.tensor([0, 0, 0, 1, 1, 2])
        width = loss.embedding_size if isinstance(loss, JRDLoss) else 8
        x = F.normalize(torch.randn(6, width, generator=torch.Generator().manual_seed(0)))
        with torch.no_grad():
            if isinstance(loss, JRDLoss):
                expected = _am_softmax(loss.metric.W, x, labels, found)
                with only(loss, lambda name: name == "metric"):
                    value = loss(x, labels, features=dict.fromkeys(loss.reads, x))
            else:
                expected = _pair_loss(x, labels, found)
                value = loss(x, labels)
        name: str = found["loss"]
        return name if torch.allclose(value, expected, rtol=1e-4) else f"not {name}"

    def _mining(self) -> str:
        miner = self.loss.miner
        match type(miner).__name__:
            case "NoneType":
                return "all"
            case "DistanceWeightedMiner":
                return "distance weighted"
            case "BatchEasyHardMiner":
                return {"semihard": "semihard", "hard": "hardest"}[miner.neg_strategy]
            case other:
                return other

    def _regularizer(self) -> dict[str, Any]:
        found: dict[str, Any] = {"regularizer": "none"}
        [(first, weight), *others] = self.terms
        assert weight == 1
        for part, weight in others:
            found |= {"regularizer": REGULARIZERS[type(part).__name__], "weight": weight}
            if isinstance(part, IntraClassRegularizer):
                found["intra_class_form"] = _intra_class(part)
            if isinstance(part, EnergyConfusionRegularizer):
                with torch.no_grad():
                    embeddings = self.network(self._images()[0])
                    found |= _confusion(part)
                    found["confusion_norm"] = self._length_seen(part, embeddings)
        attention = self.network.head.attention if hasattr(self.network.head, "attention") else None
        if isinstance(attention, VEMAttention):
            found |= {
                "attention_size": {
                    self.head.in_channels: "pooled channels",
                }.get(attention.num_features, "another"),
                "vem_start": start(attention.variance, 1, 1),
                **_variance(others[0][0]),
                "attention_gate": _gate(attention),
            }
        elif isinstance(attention, nn.Dropout):
            found |= {"regularizer": "dropout", "dropout_ratio": attention.p}
        if isinstance(first, HORDELoss):
            found |= self._horde(first)
        elif isinstance(first, JRDLoss):
            found |= _joint(first)
        return found

    def _horde(self, horde: HORDELoss) -> dict[str, Any]:
        moments = horde.moments
        embeddings = [e for e in horde.embeddings.values() if isinstance(e, nn.Linear)]
        matrices = [*moments.parameters(), *moments.buffers()]
        drawn = matrices[0]
        if len(drawn) != moments.in_channels:  # tables, a row for each bucket
            matrices = [_sketch(table, moments.in_channels) for table in matrices]
            drawn = matrices[0][matrices[0] != 0]
        orders = range(2, horde.order + 1)
        kinds = {len(orders) + 1: "cascade", sum(orders): "independent"}
        trained = any(p.requires_grad for p in moments.parameters())
        kind: Any = kinds[len(matrices)] if trained else "fixed"
        if horde.order == 2 and trained:  # order 2 alone: the same two matrices
            kind = OneOf(["cascade", "independent"])
        found: dict[str, Any] = {
            "regularizer": "HORDE",
            "orders": horde.order,
            "moment_size": matrices[0].shape[1],
            "projections": kind,
            "projections_trained": trained,
            "projection_start": start(drawn, *matrices[0].shape),
            "order_embedding_size": embeddings[0].out_features if embeddings else "none",
            "order_norm": "unit" if horde.normalize else "raw",
        }
        if embeddings:
            weight = embeddings[0].weight
            found["order_embedding_start"] = start(weight, weight.shape[1], weight.shape[0])
        [found["order_weights"]] = {*horde.order_weights}
        found["order_losses"] = self._order_losses(horde)
        found["moment_form"] = _moments(moments, matrices, horde.order)
        return found

    def _order_losses(self, horde: HORDELoss) -> str:
        """Losses of the orders, recognised by their values for embeddings of their width."""
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([0, 0, 0, 1, 1, 2])
        _, *orders = horde.losses.values()
        equal = [torch.equal(loss(x, labels), self.metric(x, labels)) for loss in orders]
        return "the metric loss" if all(equal) else "another"

    # ---------------------------------------------------------------------------------- gradients

    def _gradients(self) -> dict[str, Any]:
        return {"gradients": {term: self._reached(term) for term in self._named_terms()}}

    def _named_terms(self) -> dict[str, tuple[nn.Module, str | None]]:
        """{term: (its loss, the sub-losses that make it)}."""
        found: dict[str, tuple[nn.Module, Callable[[str], bool]]] = {}
        (first, _), *others = self.terms
        if isinstance(first, HORDELoss):
            found["metric"] = first, lambda name: name == "order_1"
            found["HORDE"] = first, lambda name: name != "order_1"
        elif isinstance(first, JRDLoss):
            found["metric"] = first, lambda name: name == "metric"
            if first.similarity_weight > 0:
                name = {"jrs": "JRS", "jmmd": "JMMD", "jintra": "JIntra"}[first.regularizer]
                found[name] = first, lambda name: name == "similarity"
        else:
            found["metric"] = first, lambda name: True
        for part, _ in others:
            name = REGULARIZERS[type(part).__name__].replace("variance attention", "variance")
            found[name] = part, lambda name: True
        return found

    def _reached(self, term: str) -> list[str]:
        """Parts of network and loss that a term's gradient reaches."""
        loss, belongs = self._named_terms()[term]
        images, labels = self._images()
        for part in self.loss.modules():
            if isinstance(part, FeatureLoss):
                part.clear()  # of other passes
        parameters = {
            **dict(self.network.named_parameters()),
            **dict(self.loss.named_parameters(prefix="loss")),
        }
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        with only(loss, belongs):
            value = loss(self.network(images), labels)
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        reached = {
            part_of(name)
            for name, gradient in zip(trained, gradients, strict=True)
            if gradient is not None and gradient.abs().max() > 0
        }
        norms = {id(p) for norm in batch_norms(self.network) for p in norm.parameters()}
        frozen = {
            part_of(name)
            for name, p in parameters.items()
            if not p.requires_grad and id(p) not in norms
        }
        order = ("trunk", "head", "attention", "projections", "class weights")
        return [part for part in order if part in reached - frozen]

    # -------------------------------------------------------------------------- batches and images

    def _batch(self) -> dict[str, Any]:
        data = self.experiment.data
        images, classes = IMAGE_DATASETS[data.dataset].counts["train"]
        labels = torch.arange(images) % classes
        sampler = StepSampler(labels, data, steps=3, seed=0)
        batches = [labels[[index for index, _ in sampler.batch(step)]] for step in range(3)]
        counts = {tuple(batch.unique(return_counts=True)[1].tolist()) for batch in batches}
        layout = "random"
        if len(counts) == 1 and len({*next(iter(counts))}) == 1:
            [of_class] = counts
            layout = f"{len(of_class)} x {of_class[0]}"
        return {"batch_size": len(batches[0]), "batch_layout": layout}

    def _views(self) -> dict[str, Any]:
        """Facts of the views, from the pixels of a picture whose red is the column and whose green is the row."""
        train, test = self.datasets.train, self.datasets.test
        assert isinstance(train, ImageSet)
        assert isinstance(test, ImageSet)
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(100, (), generator=generator)))
            drawn = [Window(train.to_picture(train.views.train(ramps()))) for _ in range(60)]
        tested = Window(test.to_picture(test.views.test(ramps())))
        mirrored = sum(window.mirrored for window in drawn)
        widths = [window.resized[0] for window in drawn]
        longest, size = max(widths), self.experiment.data.image_size
        corners = {window.corner for window in drawn}
        found = {
            "train_size": drawn[0].size,
            "test_size": tested.size,
            "train_mirror": bool(mirrored),
            "test_resize": tested.resize(),
            "test_crop": tested.crop(),
            "box_crop": False,  # the runner has no such view
        }
        assert mirrored == 0 or 15 < mirrored < 45
        if max(widths) - min(widths) < 3:
            found["train_resize"] = drawn[0].resize()
            found["train_crop"] = "random" if len(corners) > 10 else "fixed"
        elif all(abs(w.aspect - 1) < 0.03 for w in drawn):
            assert size is not None
            low, high = (round(edge / size, 1) for edge in (min(widths), longest))
            found["train_resize"] = f"{low} to {high} x crop"
            found["train_resize_side"] = "longer"
            found["train_crop"] = "random"
        else:
            found |= {"train_resize": "none", "train_crop": "random resized"}
        return found

    # ------------------------------------------------------------------------------- optimization

    def _optimization(self) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        decays = {group["weight_decay"] for group in groups}
        network = dict(self.network.named_parameters())
        of_part: dict[str, set[float]] = {}
        for name, p in (*network.items(), *self.loss.named_parameters(prefix="loss")):
            if p.requires_grad:
                part = part_of(name)
                key = part if part in ("trunk", "head", "attention") else "loss"
                of_part.setdefault(key, set()).add(rates[id(p)])
        found: dict[str, Any] = {
            "optimizer": self._optimizer(),
        }
        for part, values in of_part.items():
            [found[f"lr_{part}"]] = values
        [found["weight_decay"]] = decays
        [found["optimizer_eps"]] = {group["eps"] for group in groups}
        if decays != {0}:
            decoupled = self.optimizer.defaults["decoupled_weight_decay"]
            found["weight_decay_form"] = "decoupled" if decoupled else "in the gradient"
        data = self.experiment.data
        images, _ = IMAGE_DATASETS[data.dataset].counts["train"]
        steps = self.experiment.optimization.steps
        found["length"] = Length(steps, images, data.batch_size)
        found["schedule"] = self._schedule(steps, images / data.batch_size)
        return found

    def _optimizer(self) -> str:
        """Its name, with the options that are not its own defaults and have no fact of their own."""
        cls, apart = type(self.optimizer), ("lr", "eps", "weight_decay")
        usual = cls([nn.Parameter(torch.zeros(1))]).defaults
        given = {
            f"{name}={value}"
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name in usual and name not in apart and value != usual[name]
        }
        return " ".join([cls.__name__, *sorted(given)])

    def _schedule(self, steps: int, steps_per_epoch: float) -> str:
        """Constant, or where it falls, in epochs."""
        if self.scheduler is None:
            return "constant"
        rates, falls = self.scheduler.get_last_lr(), []
        state = self.scheduler.state_dict()
        for step in range(1, steps):
            self.optimizer.step()
            self.scheduler.step()
            if self.scheduler.get_last_lr() != rates:
                factor = self.scheduler.get_last_lr()[0] / rates[0]
                falls.append((step / steps_per_epoch, factor))
                rates = self.scheduler.get_last_lr()
        self.scheduler.load_state_dict(state)
        every = round(falls[0][0])
        for number, (epoch, factor) in enumerate(falls, 1):
            assert abs(epoch - number * every) < 0.05
            assert abs(factor - falls[0][1]) < 1e-6
        assert round((len(falls) + 1) * every) >= round(steps / steps_per_epoch)
        return f"x {falls[0][1]:g} every {every} epochs"

    # --------------------------------------------------------------------------------------- test

    def _test(self) -> dict[str, Any]:
        counts = IMAGE_DATASETS[self.experiment.data.dataset].counts
        tested = counts.get("test") or (
            counts["query"][0] + counts["gallery"][0],
            counts["gallery"][1],
        )
        evaluation = self.experiment.evaluation
        metrics = [f"recall_at_{k}" for k in evaluation.recall_at]
        metrics += ["NMI", "F1"] if evaluation.clustering else []
        metrics += ["ideal_joint_error", "h_divergence"] if evaluation.divergence else []
        found = {
            "train_images": counts["train"][0],
            "train_classes": counts["train"][1],
            "test_images": tested[0],
            "test_classes": tested[1],
            "curve_steps": evaluation.every,
            "query_gallery": self.datasets.test.is_query is not None,
            "split": self._split(),
            "metrics": Contains(metrics),
            "test_similarity": _similarity(),
            "selection": "last" if self.experiment.protocol == "paper" else "best on validation",
        }
        if evaluation.parts:
            found["parts"] = evaluation.parts
        if evaluation.clustering:
            found |= _clustering()
        if evaluation.divergence:
            found |= _bound(evaluation)
        return found

    def _split(self) -> str:
        """The published one is all training classes, and all test classes to test on."""
        data = self.experiment.data
        whole = (data.split, data.train_classes, data.max_classes) == ("test", None, None)
        return "published" if whole and self.experiment.protocol == "paper" else "another"


# --------------------------------------------------------------------------------------------- helpers


def start(weight: Tensor, fan_in: int, fan_out: int) -> Any:
    """The distribution that weights are drawn from."""
    name = _distribution(weight, fan_in, fan_out)
    return name if name == "zeros" else OneOf([name, "random"])


def _distribution(weight: Tensor, fan_in: int, fan_out: int) -> str:
    """Distribution of the weights, recognised by their largest value and their mean square."""
    values = weight.detach().float().flatten()[:200_000]
    largest, size = values.abs().max().item(), values.square().mean().sqrt().item()
    if values.unique().numel() == 2 and abs(largest - size) < 1e-6:
        return "signs"
    if largest == 0:
        return "zeros"
    if abs(size * math.sqrt(3) / largest - 1) < 0.03:
        for name, bound in (
            ("glorot uniform", math.sqrt(6 / (fan_in + fan_out))),
            ("uniform 1/sqrt(in)", 1 / math.sqrt(fan_in)),
        ):
            if 0.98 * bound < largest <= bound * (1 + 1e-6):
                return name
        return f"uniform {largest:.3g}"
    return f"normal {size:.1f}"


def _am_softmax(W: Tensor, x: Tensor, labels: Tensor, found: Mapping[str, Any]) -> Tensor:
    margins = found["loss_margin"] * F.one_hot(labels, W.shape[1])
    return F.cross_entropy(found["loss_scale"] * (x @ F.normalize(W, dim=0) - margins), labels)


def _pair_loss(x: Tensor, labels: Tensor, found: Mapping[str, Any]) -> Tensor:
    """The similarity of unit vectors, which have one similarity whether cosine or inner product."""
    same = labels[:, None] == labels
    other, same = ~same, same & ~torch.eye(len(x), dtype=torch.bool)
    near, far = x @ x.T, torch.cdist(x, x)
    if found["loss_similarity"] == "squared euclidean":
        far = far.square()
    elif found["loss_similarity"] != "euclidean":
        far = -near
    triplets = same[:, :, None] & other[:, None, :]
    match found["loss"]:
        case "contrastive":
            apart = (near[other] - found["loss_margin"]).relu() / 2
            return (1 - near[same]).square().mean() / 2 + apart[apart > 0].mean()
        case "triplet":
            terms = (far[:, :, None] - far[:, None, :] + found["loss_margin"]).relu()[triplets]
            return terms.sum() if found["loss_reduction"] == "sum" else terms[terms > 0].mean()
        case "binomial deviance":
            scaled = found["loss_alpha"] * (near - found["loss_beta"])
            close, apart = F.softplus(-scaled), F.softplus(found["loss_C"] * scaled)
            by_anchor = [(close * same).sum(dim=1), (apart * other).sum(dim=1)]
            if found["loss_reduction"].endswith("means"):
                counts = [mask.sum(dim=1).clamp(min=1) for mask in (same, other)]
                by_anchor = [total / count for total, count in zip(by_anchor, counts, strict=True)]
            return torch.stack(by_anchor).sum()
        case "N-pair":
            exponents = near[:, :, None] - near[:, None, :]  # anchor, negative, positive
            terms = (exponents.exp() * other[:, :, None]).sum(dim=1).log1p()
            return terms[same].sum()
        case "margin":
            beyond = far - found["loss_beta"]
            pairs = beyond[:, :, None], -beyond[:, None, :]  # of each triplet, as it is mined
            terms = torch.stack(
                [(found["loss_margin"] + pair).expand_as(triplets)[triplets] for pair in pairs]
            ).relu()
            return terms[terms > 0].mean()
        case name:
            raise AssertionError(name)


def _confusion(part: EnergyConfusionRegularizer) -> dict[str, Any]:
    """Read off as many classes of two as a batch of the paper has."""
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    x, labels = F.normalize(x), torch.arange(128) // 2
    value = part(x, labels, features=x)
    energies = torch.cdist(x, x).square().view(64, 2, 64, 2).mean(dim=(1, 3))
    energies = energies[~torch.eye(64, dtype=torch.bool)]
    logs = energies.log1p()
    forms = {
        ("log(1 + L) per pair, summed", "ordered, all"): logs.sum(),
        ("log(1 + L) per pair, summed", "unordered, all"): logs.sum() / 2,
        ("log(1 + L) per pair, averaged", "all"): logs.mean(),
        ("L per pair, summed", "ordered, all"): energies.sum(),
        ("another", "another"): value,
    }
    form, pairs = next(w for w, size in forms.items() if torch.allclose(value, size, rtol=1e-4))
    return {"confusion_form": form, "confusion_pairs": pairs}


def _variance(part: nn.Module) -> dict[str, Any]:
    x, predicted = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.ones(3)
    value = part(x, torch.arange(5), features=(x, predicted))
    for correction, words in enumerate(("1/N", "1/(N-1)")):
        errors = (x.var(dim=0, correction=correction) - predicted).square()
        for form, size in (("mean of squares", errors.mean()), ("sum of squares", errors.sum())):
            if torch.allclose(value, size):
                return {"variance_loss": form, "variance_form": words}
    return {"variance_loss": "another", "variance_form": "another"}


def _intra_class(part: IntraClassRegularizer) -> str:
    """Fact from a class of three unit vectors, at squared distances of 2, 2 and 4, and one of two equal ones."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    value = part(x, torch.tensor([0, 0, 0, 1, 1])).item()
    printed = -((2 * math.exp(-1) + math.exp(-2)) / 3 + 1)
    words = "exp(-d^2 / 2), averaged over a class's pairs, summed over classes"
    return words if math.isclose(value, printed, rel_tol=1e-5) else "another"


def _sketch(table: Tensor, channels: int) -> Tensor:
    """The matrix (C, d) of a table (d, R) whose row j has the channels, from 1, that go to j, signed."""
    buckets = torch.arange(len(table)).unsqueeze(1).expand_as(table)
    matrix = torch.zeros(channels + 1, len(table))
    matrix[table.abs().long(), buckets] = table.sign().float()
    return matrix[1:]


def _moments(moments: nn.Module, matrices: list[Tensor], order: int) -> str:
    """Formula of the moments, recognised by their directions; the matrices are in the order of their use."""
    x = torch.randn(2, matrices[0].shape[0], 2, 2, generator=torch.Generator().manual_seed(0))
    used, forms = iter(matrices), {"products", "convolutions"}
    shared = list(matrices) if len(matrices) == order else None
    with torch.no_grad():
        for k, found in enumerate(moments(x), 2):
            own = shared[:k] if shared else [next(used) for _ in range(k)]
            projected = torch.stack([x.flatten(2).mT @ matrix.float() for matrix in own])
            convolved = torch.fft.ifft(torch.fft.fft(projected).prod(dim=0)).real
            for form, printed in (("products", projected.prod(dim=0)), ("convolutions", convolved)):
                if F.cosine_similarity(found, printed.mean(dim=1)).min() < 0.999:
                    forms.discard(form)
    return f"{forms.pop()} of projections, averaged over positions" if forms else "another"


def _joint(loss: JRDLoss) -> dict[str, Any]:
    names = {"jrs": "JRS", "jmmd": "JMMD", "jintra": "JIntra"}
    if loss.similarity_weight == 0:
        return {}
    return {
        "regularizer": names[loss.regularizer] if _joins(loss) else "another",
        "weight": loss.similarity_weight,
        "representations": list(loss.kernels),
        "kernels": {name: _kernel(kernel) for name, kernel in loss.kernels.items()},
        **({"pooled_norm": _length(loss.kernels["pooled"])} if "pooled" in loss.kernels else {}),
        **_bandwidth(loss.kernels["embeddings"]),
    }


def _joins(loss: JRDLoss) -> bool:
    """Does it compute its equation, 10, 15 or 16, of the products of its kernels?"""
    generator, labels = torch.Generator().manual_seed(0), torch.tensor([0, 0, 0, 1, 1, 2])
    x = F.normalize(torch.randn(6, loss.embedding_size, generator=generator))
    pooled = torch.randn(6, 16, generator=generator)
    with torch.no_grad(), only(loss, lambda name: name == "similarity"):
        value = loss(x, labels, features=dict.fromkeys(loss.reads, pooled))
        found = {"classes": x @ F.normalize(loss.metric.W, dim=0), "embeddings": x}
        matrices = [kernel(found.get(name, pooled)) for name, kernel in loss.kernels.items()]
        K = torch.stack(matrices).prod(dim=0)
    same = labels[:, None] == labels
    means = same / same.sum(dim=1, keepdim=True)
    S = means @ K @ means.T
    norms = S.diagonal()
    pairs = {
        "jrs": K,
        "jmmd": -(norms[:, None] + norms - 2 * S).clamp(min=0).sqrt(),
        "jintra": -(norms.sqrt()[:, None] + norms.sqrt()),
    }[loss.regularizer]
    return torch.allclose(value, loss.similarity_weight * pairs[~same].mean(), rtol=1e-4)


def _kernel(kernel: nn.Module) -> str:
    """Formula of the kernel, recognised by its values for unit vectors."""
    x = torch.eye(3, dtype=torch.float64)
    x[2] = torch.tensor([0.6, 0.8, 0.0])
    products, squares, ones = x @ x.T, torch.cdist(x, x).square(), torch.cdist(x, x, p=1)
    tau = squares.sum() / 6
    known = {
        "Laplace": (-ones / (ones.sum() / 6)).exp(),
        "(x.x' + 1)^2": (products + 1) ** 2,
        "(x.x' + 1)^5": (products + 1) ** 5,
        "exp(x.x')": products.exp(),
        **{
            f"{K} Gaussians": sum(
                (-squares / (tau * 2.0**k)).exp() for k in range(-(K // 2), K // 2 + 1)
            )
            / K
            for K in (1, 3, 5)
        },
    }
    [name] = [name for name, values in known.items() if torch.allclose(kernel(x), values)]
    return name


def _length(kernel: nn.Module) -> str:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    return (
        "unit"
        if torch.allclose(kernel(x)[0], kernel(x / x.norm(dim=1, keepdim=True))[0])
        else "raw"
    )


def _bandwidth(kernel: nn.Module) -> dict[str, Any]:
    """Doubled distances have the values of the single ones where the bandwidth is their mean."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    name = _kernel(kernel)
    if not name.endswith("Gaussians") and name != "Laplace":
        return {}
    assert torch.allclose(kernel(x), kernel(2 * x))
    return {"bandwidth": "mean L1 distance" if name == "Laplace" else "mean squared distance"}


def _gate(attention: nn.Module) -> str:
    gates = attention(torch.ones(1, attention.num_features))
    return "sigmoid" if torch.allclose(gates[0], attention.variance.sigmoid()) else "another"


def _similarity() -> Any:
    """Similarity by which every image finds its class here; lengths and inner products fail on the first."""
    x = torch.tensor([[1.0, 0.0], [10.0, 1.0], [1.0, 0.5], [2.0, 1.1]])
    found = measure(x, torch.tensor([0, 0, 1, 1]), [1])["recall_at_1"]
    return OneOf(["cosine", "euclidean"] if found == 1 else [])  # of unit vectors: one ranking


def _bound(evaluation: Evaluation) -> dict[str, str]:
    """Facts from a sum of two errors, and from seen classes that no unseen class is near."""
    x, labels = torch.eye(40) + 1, torch.arange(40) % 2
    with patch("benchmarks.evaluation.outputs.ideal_joint_error", return_value=2.0):
        means, _ = over_parts(x, labels, (-x, labels), evaluation)
    errors = {2: "sum of the errors on seen and unseen classes", 1: "mean of these errors"}
    divergence = "1 - error" if means["h_divergence"] == 1 else "another"
    return {"ideal_error": errors[means["ideal_joint_error"]], "h_divergence": divergence}


def _clustering() -> dict[str, Any]:
    """Facts from the arguments of k-means for four images of two classes."""
    with patch("benchmarks.evaluation.tester.FaissKMeans") as k_means:
        k_means.return_value.return_value = torch.tensor([0, 0, 1, 1])
        cluster_metrics(torch.eye(4), torch.tensor([3, 3, 5, 5]))
    clusters = k_means.return_value.call_args.args[1]
    return {
        "kmeans_clusters": "test classes" if clusters == 2 else clusters,
        "kmeans_restarts": k_means.call_args.kwargs["nredo"],
    }


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name."""
    for word, part in (
        ("head.attention", "attention"),
        ("fc.", "head"),
        ("moments", "projections"),
        (".embeddings.", "projections"),
        ("W", "class weights"),
        ("beta", "beta"),
    ):
        if word in name and not name.startswith("trunk."):
            return part
    return "trunk" if not name.startswith("loss") else name


@contextmanager
def only(loss: nn.Module, belongs: Callable[[str], bool]) -> Iterator[None]:
    """A loss of which some sub-losses count."""
    compute = loss.compute_loss

    def some(*arguments: Any, **options: Any) -> Mapping[str, Any]:
        found = compute(*arguments, **options)
        return {
            name: values if belongs(name) else {**values, "losses": values["losses"] * 0}
            for name, values in found.items()
        }

    with patch.object(loss, "compute_loss", some):
        yield


def ramps() -> Image.Image:
    """A picture whose red grows with the column, whose green with the row, with a blue of 255."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    pixels = [columns * 255 / (WIDTH - 1), rows * 255 / (HEIGHT - 1), np.full((HEIGHT, WIDTH), 255)]
    return Image.fromarray(np.stack(pixels, axis=2).round().astype(np.uint8))


class Window:
    """The part of the ramps that a view shows, and its scale."""

    def __init__(self, picture: np.ndarray) -> None:
        self.size = len(picture)
        shown = picture[..., 2] > 128
        rows, columns = np.flatnonzero(shown.any(axis=1)), np.flatnonzero(shown.any(axis=0))
        red = picture[rows[len(rows) // 2], columns, 0].astype(float)
        green = picture[rows, columns[len(columns) // 2], 1].astype(float)
        slopes = [np.polyfit(np.arange(len(line)), line, 1) for line in (red, green)]
        self.mirrored = slopes[0][0] < 0
        red_width, green_height = (255 / abs(slope) for slope, _ in slopes)
        scales = [red_width * WIDTH / (WIDTH - 1), green_height * HEIGHT / (HEIGHT - 1)]
        self.resized = (scales[0], scales[1])
        self.aspect = (scales[0] / WIDTH) / (scales[1] / HEIGHT)
        self.corner = (round(float(red.min())), round(float(green.min())))
        self.centered = all(abs(float(line.mean()) - 127.5) < 2 for line in (red, green))

    def crop(self) -> str:
        """Way in which the view was cut out of the resized picture."""
        if all(abs(side - self.size) < 2 for side in self.resized):
            return "none"
        return "center" if self.centered else "another"

    def resize(self) -> str:
        """The size that the whole picture was resized to."""
        width, height = (round(side) for side in self.resized)
        if abs(self.aspect - 1) > 0.03:
            return f"{width} x {height}"
        return f"shorter side {min(width, height)}"


@dataclass(frozen=True)
class Length:
    """Length of a training, equal to the words "8000 steps" and "50 epochs"."""

    steps: int
    images: int
    batch_size: int

    def __eq__(self, said: object) -> bool:
        number, unit = str(said).split()
        if unit == "steps":
            return self.steps == int(number)
        exact = self.images * int(number) / self.batch_size
        whole = int(number) * math.ceil(self.images / self.batch_size)
        return self.steps in (math.ceil(exact), whole)


@dataclass(frozen=True)
class OneOf:
    """Equal to each of several words."""

    words: list[str]

    def __eq__(self, said: object) -> bool:
        return said in self.words


@dataclass(frozen=True)
class Contains:
    """The measured metrics, equal to any selection of it."""

    names: list[str]

    def __eq__(self, said: object) -> bool:
        return isinstance(said, list) and {*said} <= {*self.names}
