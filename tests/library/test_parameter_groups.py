"""Optimizer groups of a network and its loss, and the check that nothing is left out."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from pml_regularizers import DistributedLoss, HORDELoss, VEMAttention, parameter_groups
from tests.support.toys import CHANNELS, WIDTH, Attended, Network


def horde(base: nn.Module | None = None, **kwargs: Any) -> HORDELoss:
    base = losses.ContrastiveLoss() if base is None else base
    settings = {"order": 3, "moment_dim": 8, "projections": "cascaded", **kwargs}
    return HORDELoss(base, CHANNELS, WIDTH, **settings)


def paths(groups: list[dict[str, Any]]) -> dict[str, int]:
    return {group["name"]: len(group["params"]) for group in groups}


class TestParameterGroups:
    def test_network_loss_and_what_brings_its_own_settings(self) -> None:
        model, loss = Attended(), horde()
        groups = parameter_groups(model, loss, lr=1e-5, loss_lr=1e-3, weight_decay=1e-4)
        assert paths(groups) == {"model": 5, "model.head.attention": 1, "loss": 5}
        settings = {g["name"]: (g["lr"], g["weight_decay"]) for g in groups}
        assert settings == {
            "model": (1e-5, 1e-4),
            "model.head.attention": (1e-2, 0.0),
            "loss": (1e-3, 1e-4),
        }
        assert groups[1]["params"][0] is model.head.attention.variance

    def test_longer_paths_win_and_keep_what_they_do_not_set(self) -> None:
        groups = parameter_groups(
            Attended(),
            lr=1e-5,
            weight_decay=0.5,
            overrides={
                "model.head": {"lr": 1e-4, "betas": (0.5, 0.9)},
                "model.head.attention": {"lr": 3e-2},
                "model.trunk.0.bias": {"weight_decay": 0.0},
            },
        )
        assert {g.pop("name"): {k: v for k, v in g.items() if k != "params"} for g in groups} == {
            "model": {"lr": 1e-5, "weight_decay": 0.5},
            "model.trunk.0.bias": {"lr": 1e-5, "weight_decay": 0.0},
            "model.head": {"lr": 1e-4, "weight_decay": 0.5, "betas": (0.5, 0.9)},
            "model.head.attention": {"lr": 3e-2, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        }

    def test_shared_parameters_are_in_one_group_and_frozen_ones_in_none(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), VEMAttention(4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[3].requires_grad_(False)
        loss = nn.Sequential(model[2], nn.Linear(4, 4))
        loss[1].bias = model[1].bias
        groups = parameter_groups(model, loss, lr=1)
        assert paths(groups) == {"model": 3, "model.2": 1, "loss": 1}
        found = {parameter for group in groups for parameter in group["params"]}
        assert found == {p for p in nn.ModuleList([model, loss]).parameters() if p.requires_grad}

    def test_wrappers_do_not_change_the_paths(self) -> None:
        loss = horde(losses.ArcFaceLoss(3, WIDTH))
        compiled = torch.compile(loss, backend="eager")
        wrapped = (nn.DataParallel(loss), DistributedLossWrapper(loss), DistributedLoss(compiled))
        for made in (loss, *wrapped):
            overrides = {"loss.losses.order_1": {"lr": 7.0}}
            groups = parameter_groups(Network(), made, lr=1, overrides=overrides)
            assert paths(groups) == {"model": 5, "loss": 7, "loss.losses.order_1": 1}

    def test_an_override_of_nothing(self) -> None:
        with pytest.raises(ValueError, match=r"no trained parameter is at model\.head\.f;"):
            parameter_groups(Network(), lr=1, overrides={"model.head.f": {"lr": 2}})
