"""Random programs of passes and calls: every answer has the features of its embeddings, or is an error."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pml_regularizers import FeatureLoss, MissingFeaturesError
from pml_regularizers.features.feature_loss import already_reduced
from tests.support.toys import Network


class Seen(FeatureLoss):
    """Keeps the map that it was called with."""

    def compute_loss(self, *args: Any) -> dict[str, Any]:
        self.seen = self.features
        return {"loss": already_reduced(self.features.square().mean())}


class Plain(nn.Module):
    """A network without an `EmbeddingHead`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.Tanh())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        embeddings: Tensor = self.head(self.trunk(x))
        return embeddings


ATTACHED: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    "head": (Network, lambda network: {"source": network.head}),
    "embedder": (Plain, lambda network: {"source": network.trunk, "embedder": network}),
    "stage before": (Plain, lambda network: {"source": network.trunk, "embedder": network.head}),
}
"""A network, and the arguments of `attach`."""

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "detached": lambda x: x.detach(),
    "copied": lambda x: x.clone(),
    "in another precision": lambda x: x.double(),
    "a new leaf": lambda x: x.detach().clone().requires_grad_(),
    "scaled": lambda x: F.normalize(3 * x),
    "reordered": lambda x: x.flip(0),
    "reordered in place": lambda x: x.copy_(x.flip(0)),
    "reordered by an index": lambda x: x[torch.arange(len(x)).roll(1)],
    "reordered by cat": lambda x: torch.cat([x[1:], x[:1]]),
    "reordered by views": lambda x: (  # of two images each, as SupCon's example does
        torch.stack(x.chunk(2), 1).flatten(0, 1) if len(x) == 4 else x.mT.flip(1).mT
    ),
    "reordered and scaled": lambda x: F.normalize(x.flip(0)),
    "shortened": lambda x: x[1:],
    "shortened without gradients": torch.no_grad()(lambda x: x[1:]),
}


class Program:
    """Passes and calls at random, and the map behind all embeddings so far."""

    def __init__(self, how: str, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        make, arguments = ATTACHED[how]
        self.dtype = self.random.choice([torch.float32, torch.bfloat16])
        self.network = make().to(self.dtype)
        self.reference = copy.deepcopy(self.network)
        self.frozen = self.random.choice([False, False, "trunk", "all"])
        if self.frozen:
            frozen = self.network.trunk if self.frozen == "trunk" else self.network
            frozen.requires_grad_(False)
        self.loss = Seen().attach(**arguments(self.network), frozen=bool(self.frozen))
        self.made: list[tuple[Tensor, Tensor]] = []
        self.right = self.refused = 0

    def embed(self, training: bool) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.random.choice([3, 4]), 3, 8, 8, dtype=self.dtype)
        with torch.no_grad():
            expected = self.reference.trunk(x)
        with torch.set_grad_enabled(training):
            self.made.append((self.network(x), expected))
        return self.made[-1]

    def fail(self, training: bool) -> None:
        """A pass that ends before the embedder, or in it."""
        x = torch.randn(3, 3, 8, 8, dtype=self.dtype)
        with torch.set_grad_enabled(training), suppress(ZeroDivisionError):
            if self.random.random() < 0.5:
                getattr(self.network.head, "feature_map", nn.Identity())(self.network.trunk(x))
            else:
                *_, last = self.network.head.children()
                last = getattr(self.network.head, "fc", last)
                with last.register_forward_pre_hook(lambda *_: 1 / 0):
                    self.network(x)

    def call(self, embeddings: Tensor, expected: Tensor) -> bool:
        """Call the loss: its features are the expected ones, or are refused."""
        training = self.random.random() < 0.5
        with torch.set_grad_enabled(training):
            try:
                self.loss(embeddings, torch.arange(len(embeddings)))
            except MissingFeaturesError:
                self.refused += 1
                return False
        torch.testing.assert_close(self.loss.seen.detach(), expected.float(), rtol=1e-5, atol=1e-6)
        traced = training and embeddings.requires_grad and not self.frozen
        assert self.loss.seen.requires_grad or not traced
        self.right += 1
        return True

    def step(self) -> None:
        """One of: a pass, a step of training or testing, a call for any embeddings so far, one for two passes."""
        action = self.random.choice(
            ["pass", "pass", "fail", "step", "step", "call", "call", "two", "clear"]
        )
        training = self.random.random() < 0.6
        if action == "pass":
            self.embed(training)
        elif action == "step":
            assert self.call(*self.embed(training))
        elif action == "fail":
            self.fail(training)
        elif action == "clear":
            self.loss.clear()
        elif self.made and action == "call":
            embeddings, expected = self.random.choice(self.made[-4:])
            change = self.random.choice(list(CHANGES))
            moved = change.startswith("reordered") or change.startswith("shortened")
            self.call(CHANGES[change](embeddings), CHANGES[change](expected) if moved else expected)
        elif self.made:
            (one, first), (other, second) = self.random.choices(self.made[-4:], k=2)
            self.call(torch.cat([one, other]), torch.cat([first, second]))


@pytest.mark.parametrize("how", ATTACHED)
def test_every_answer_is_right_or_an_error(how: str) -> None:
    right = refused = 0
    for seed in range(25):
        program = Program(how, seed)
        for _ in range(30):
            program.step()
        right += program.right
        refused += program.refused
    assert right > 40 and refused > 40  # the programs try both
