"""Accuracies at the size of Stanford Online Products, and their times."""

import torch
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.reporting import Table
from tests.gpu.correctness import exact_accuracies
from tests.gpu.part import Part
from tests.gpu.timing import alternate, median, peak_megabytes, ratios, seconds_of

BLOCK = 1024
"""Queries that are compared at once, where this is not the library's choice."""


class Retrieval:
    """Random vectors around centres, each to be found among all others."""

    def __init__(self, part: Part) -> None:
        self.part, device = part, part.device
        n, width, classes = (60, 8, 12) if part.tiny else (60_502, 512, 11_316)
        recalls = (1, 10) if part.tiny else (1, 10, 100, 1000)
        self.labels = torch.arange(n, device=device) % classes
        centres = torch.randn(classes, width, device=device)
        noise = torch.randn(n, width, device=device)
        self.vectors = F.normalize(centres[self.labels] + 1.5 * noise)
        self.recalls, self.k = recalls, min(1000, n - 1)
        self.names = ("mean_average_precision_at_r", "r_precision")
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

    def rank_by_pml(self) -> dict[str, float]:
        """PML's accuracies with PML's own search by torch: faiss may be missing."""
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN

        search = CustomKNN(CosineSimilarity(), batch_size=BLOCK)
        include = ("precision_at_1", *self.names[:2])
        pml = AccuracyCalculator(include, k=self.k, device=self.part.device, knn_func=search)
        found: dict[str, float] = pml.get_accuracy(self.vectors, self.labels)
        return found

    def check(self) -> None:
        expected = exact_accuracies(self.vectors.double(), self.labels, self.recalls)
        found = self.rank()
        for name in self.names:
            self.part.check(name, found[name], expected[name], 1e-4)

    def measure(self) -> None:
        part = self.part
        rows = {
            "matrix product alone": self.multiply,
            "matrix product and topk": self.search,
            "RankAccuracyCalculator": self.rank,
        }
        megabytes = {name: peak_megabytes(run, part.device) for name, run in rows.items()}
        end, most = part.clock() + 6, 1 if part.tiny else 9
        rounds = alternate(rows, part.device, lambda: part.clock() > end, most=most)
        table = Table(["", "seconds", "ratio", "MB"], [])
        for name, times in rounds.items():
            ratio = median(ratios(rounds, name))
            row = [name, f"{median(times):.3g}", f"{ratio:.2f}", f"{megabytes[name]:,.0f}"]
            table.rows.append(row)
        part.tell(f"{len(next(iter(rounds.values())))} rounds.\n\n{table.markdown()}")

    def measure_pml(self) -> None:
        part, accuracies = self.part, []
        seconds = seconds_of(lambda: accuracies.append(self.rank_by_pml()), part.device)
        own = seconds_of(lambda: accuracies.append(self.rank()), part.device)
        part.tell(
            f"PML's `AccuracyCalculator` with k = {self.k:,}, once: {seconds:.3g} s; `RankAccuracyCalculator` "
            f"directly after it: {own:.3g} s."
        )
        by_pml, by_ranks = accuracies
        name = self.names[0]
        part.check("PML's Precision@1", by_pml["precision_at_1"], by_ranks["recall_at_1"], 1e-3)
        part.check("PML's MAP@R", by_pml[name], by_ranks[name], 1e-3)
