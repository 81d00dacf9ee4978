"""Accuracies of random vectors against those from all distances, and their times."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor
from torch.nn import functional as F

import pml_regularizers as ours
from speed.case import Case
from speed.measuring import peak_bytes, process_bytes

BLOCK = 1024
"""Queries that are compared at once, where this is not the library's choice."""

RECALLS = (1, 10, 100, 1000)  # PML's calculator has only the first

MAP, R_PRECISION, MRR = "mean_average_precision_at_r", "r_precision", "mean_reciprocal_rank"


class Retrieval:
    """n random vectors around the centres of their classes, each to be found among all others.

    With queries, the first so many are to be found among the rest.
    """

    def __init__(
        self, case: Case, n: int, classes: int, width: int = 512, queries: int | None = None
    ) -> None:
        if case.tiny:
            n, classes, width, queries = 60, 12, 8, queries and 20
        device = case.device
        self.case, self.k = case, min(1000, n - 1)
        self.labels = torch.arange(n, device=device) % classes
        centres = torch.randn(classes, width, device=device)[self.labels]
        self.vectors = F.normalize(centres + 1.5 * torch.randn(n, width, device=device))
        self.given, size = [self.vectors, self.labels], f"{n:,}"
        if queries is not None:
            size = f"{queries:,} against {n - queries:,}"
            self.given = [x[:queries] for x in self.given] + [x[queries:] for x in self.given]
        self.size = f"{size} vectors of {width} in {classes:,} classes, drawn around random centres"

    def ranks(self, recalls: Sequence[int], *more: str) -> Callable[..., dict[str, float]]:
        names = (MAP, R_PRECISION, *more, *(f"recall_at_{K}" for K in recalls))
        calculator: Any = ours.RankAccuracyCalculator(
            names, device=self.case.device, recall_at=recalls
        )
        return partial(calculator.get_accuracy, *self.given)

    def check(self, bound: float, recalls: Sequence[int] = RECALLS) -> None:
        """Against distances in float64."""
        expected = exact_accuracies(self.vectors.double(), self.labels, recalls)
        for name, found in self.ranks(recalls, MRR)().items():
            self.case.check(name, found, expected[name], bound)

    def compare_products(self) -> None:
        """With the products that the ranks need, and with the search for the nearest."""

        def multiply(search: Callable[[Tensor], object]) -> None:
            for rows in self.vectors.split(BLOCK):
                search(rows @ self.vectors.T)

        rows: dict[str, Callable[[], object]] = {
            "matrix product alone": partial(multiply, lambda _: None),
            "matrix product and topk": partial(multiply, partial(torch.topk, k=self.k)),
            "RankAccuracyCalculator": self.ranks(RECALLS),
        }
        self.case.compare("Times", self.size, rows, rounds=9, memory=peak_bytes)

    def calculators(self, search: Any = None) -> dict[str, Callable[[], dict[str, float]]]:
        """PML's with a search, which is faiss on the CPU unless it is given, and ours."""
        device = torch.device("cpu") if search is None else self.case.device
        names = ("precision_at_1", MAP, R_PRECISION)
        pml = AccuracyCalculator(names, k=self.k, device=device, knn_func=search)
        given = [x.to(device) for x in self.given]
        return {
            "PML's AccuracyCalculator, k = 1000": partial(pml.get_accuracy, *given),
            "RankAccuracyCalculator": self.ranks(RECALLS),
        }

    def check_pml(self) -> None:
        """With PML's own search by torch: faiss may be missing."""
        rows = self.calculators(CustomKNN(CosineSimilarity(), batch_size=BLOCK))
        self.case.compare("PML's calculator", self.size, rows, rounds=1, memory=None)
        by_pml, by_ranks = (run() for run in rows.values())
        recall, precision = by_ranks["recall_at_1"], by_pml["precision_at_1"]
        self.case.check("PML's Precision@1", precision, recall, 1e-3)
        self.case.check("PML's MAP@R", by_pml[MAP], by_ranks[MAP], 1e-3)


def exact_accuracies(vectors: Tensor, labels: Tensor, recalls: Sequence[int]) -> dict[str, float]:
    """Accuracies of each vector among the others from all distances, in the vectors' precision, on their device."""
    n, device = len(labels), vectors.device
    halves = vectors.square().sum(dim=1) / 2
    sums: dict[str, float] = {}
    for rows in torch.arange(n, device=device).split(BLOCK):
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
        values[MRR] = 1 / ranks[:, 0]
        values[R_PRECISION] = within.sum(dim=1) / R
        values[MAP] = torch.where(within, j / ranks, 0).sum(dim=1) / R
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value.double().sum().item()
    return {name: value / n for name, value in sums.items()}


def compare_calculators(case: Case, dataset: str, retrieval: Retrieval, rounds: int) -> None:
    title = f"Recall@1, 10, 100, 1000, MAP@R and R-precision: {dataset}"
    rows = retrieval.calculators()
    case.compare(title, retrieval.size, rows, rounds=rounds, memory=process_bytes)


def stanford(case: Case) -> None:
    """Evaluation against PML's calculator, with the search of faiss."""
    compare_calculators(case, "Stanford Online Products", Retrieval(case, 60_502, 11_316), 1)


def in_shop(case: Case) -> None:
    """Evaluation of queries among others against PML's calculator, with the search of faiss."""
    compare_calculators(case, "In-Shop", Retrieval(case, 26_830, 3_985, queries=14_218), 3)


def retrieval(case: Case) -> None:
    """Evaluation at the size of Stanford Online Products.

    Recall@1, 10, 100, 1000, MAP@R and R-precision of 60,502 random vectors of 512 in 11,316 classes, each among all
    others. The accuracies of `RankAccuracyCalculator` are compared with those from all distances in float64 on the
    GPU, from which rare near ties differ. Times: one matrix product with all distances, in blocks of 1,024 queries,
    is the floor; then the same with torch's `topk` of 1,000; `RankAccuracyCalculator`; and PML's
    `AccuracyCalculator` with PML's own search by torch for k = 1,000 neighbours, which knows no Recall@K beyond
    Precision@1.
    """
    vectors = Retrieval(case, 60_502, 11_316)
    case.run("accuracies against float64", 4, partial(vectors.check, 1e-4))
    case.run("times", 4, vectors.compare_products)
    case.run("PML's AccuracyCalculator", 12, vectors.check_pml)
