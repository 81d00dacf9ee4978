"""Accuracies of random vectors against those from all distances, and their times."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.speed.measuring import Comparison
from tools.gpu.part import Part
from tools.gpu.timing import peak_bytes

BLOCK = 1024
"""Queries that are compared at once, where this is not the library's choice."""


class Retrieval:
    """n random vectors around the centres of their classes, each to be found among all others."""

    def __init__(
        self, part: Part, n: int, width: int, classes: int, recalls: Sequence[int]
    ) -> None:
        if part.tiny:
            n, width, classes, recalls = 60, 8, 12, (1, 10)
        self.part, device = part, part.device
        self.labels = torch.arange(n, device=device) % classes
        centres = torch.randn(classes, width, device=device)[self.labels]
        self.vectors = F.normalize(centres + 1.5 * torch.randn(n, width, device=device))
        self.size = f"{n:,} vectors of {width} in {classes:,} classes"
        self.recalls, self.k = recalls, min(1000, n - 1)
        self.names = ("mean_average_precision_at_r", "r_precision", "mean_reciprocal_rank")
        self.names += tuple(f"recall_at_{K}" for K in recalls)
        self.calculator = ours.RankAccuracyCalculator(self.names, device=device, recall_at=recalls)

    def multiply(self) -> None:
        for rows in self.vectors.split(BLOCK):
            rows @ self.vectors.T

    def search(self) -> None:
        for rows in self.vectors.split(BLOCK):
            (rows @ self.vectors.T).topk(self.k)

    def rank(self) -> dict[str, float]:
        found: dict[str, float] = self.calculator.get_accuracy(self.vectors, self.labels)
        return found

    def check(self, bound: float) -> None:
        expected = exact_accuracies(self.vectors.double(), self.labels, self.recalls)
        found = self.rank()
        for name in self.names:
            self.part.check(name, found[name], expected[name], bound)

    def measure(self) -> None:
        rows = {
            "matrix product alone": self.multiply,
            "matrix product and topk": self.search,
            "RankAccuracyCalculator": self.rank,
        }
        times = Comparison("Times", self.size, rows, rounds=9, memory=peak_bytes)
        self.part.tell(times.section(self.part.tiny))

    def measure_pml(self) -> None:
        """With PML's own search by torch: faiss may be missing."""
        part, name = self.part, self.names[0]
        search = CustomKNN(CosineSimilarity(), batch_size=BLOCK)
        include = ("precision_at_1", name, "r_precision")
        pml = AccuracyCalculator(include, k=self.k, device=part.device, knn_func=search)
        times = [time.perf_counter()]
        by_pml = pml.get_accuracy(self.vectors, self.labels)  # numbers: the GPU has done all
        times.append(time.perf_counter())
        by_ranks = self.rank()
        times.append(time.perf_counter())
        seconds, own = times[1] - times[0], times[2] - times[1]
        part.tell(
            f"PML's `AccuracyCalculator` with k = {self.k:,}, once: {seconds:.3g} s; `RankAccuracyCalculator` "
            f"directly after it: {own:.3g} s."
        )
        part.check("PML's Precision@1", by_pml["precision_at_1"], by_ranks["recall_at_1"], 1e-3)
        part.check("PML's MAP@R", by_pml[name], by_ranks[name], 1e-3)


def exact_accuracies(
    vectors: Tensor, labels: Tensor, recalls: Sequence[int], block: int = BLOCK
) -> dict[str, float]:
    """Accuracies of each vector among the others from all distances, in the vectors' precision, on their device."""
    n, device = len(labels), vectors.device
    halves = vectors.square().sum(dim=1) / 2
    sums: dict[str, float] = {}
    for rows in torch.arange(n, device=device).split(block):
        distances = torch.addmm(halves, vectors[rows], vectors.T, alpha=-1)
        right = labels[rows, None] == labels
        own_place = rows - rows[0], rows  # a vector is not ranked against itself
        right[own_place] = False
        distances[own_place] = torch.inf
        R = right.sum(dim=1)
        own = distances.masked_fill(~right, torch.inf)
        own = own.topk(int(R.max()), largest=False, sorted=True).values
        wrong = distances.masked_fill_(right, torch.inf)
        j = torch.arange(1, own.shape[1] + 1, device=device)
        nearer = [(wrong <= own[:, k, None]).sum(dim=1) for k in range(own.shape[1])]
        ranks = (torch.stack(nearer, dim=1) + j).double().masked_fill(own.isinf(), torch.inf)
        within = ranks <= R[:, None]
        values = {f"recall_at_{K}": ranks[:, 0] <= K for K in recalls}
        values["mean_reciprocal_rank"] = 1 / ranks[:, 0]
        values["r_precision"] = within.sum(dim=1) / R
        values["mean_average_precision_at_r"] = torch.where(within, j / ranks, 0).sum(dim=1) / R
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value.double().sum().item()
    return {name: value / n for name, value in sums.items()}


def retrieval(part: Part) -> None:
    """Evaluation at the size of Stanford Online Products.

    Recall@1, 10, 100, 1000, MAP@R and R-precision of 60,502 random vectors of 512 in 11,316 classes, each among all
    others. The accuracies of `RankAccuracyCalculator` are compared with those from all distances in float64 on the
    GPU, from which rare near ties differ. Times: one matrix product with all distances, in blocks of 1,024 queries,
    is the floor; then the same with torch's `topk` of 1,000; `RankAccuracyCalculator`; and PML's
    `AccuracyCalculator` with PML's own search by torch for k = 1,000 neighbours, which knows no Recall@K beyond
    Precision@1.
    """
    retrieval = Retrieval(part, 60_502, 512, 11_316, (1, 10, 100, 1000))
    part.run("accuracies against float64", 4, partial(retrieval.check, 1e-4))
    part.run("times", 4, retrieval.measure)
    part.run("PML's AccuracyCalculator", 12, retrieval.measure_pml)
