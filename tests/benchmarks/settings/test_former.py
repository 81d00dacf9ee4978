"""Descriptions of classes that changed keep the identity of the first published results."""

from typing import Any

import pytest

from benchmarks.settings import former
from benchmarks.settings.differences import config_changes, settings_of_results
from benchmarks.settings.former import Former, identity

OLD = {
    "class_path": "pml_regularizers.losses.horde_loss.HORDE",
    "init_args": {"products": "full", "seed": 0, "loss": {"class_path": "torch.nn.Linear"}},
}
NEW = {
    "class_path": "pml_regularizers.losses.horde_loss.HORDELoss",
    "init_args": {"dtype": None, "mean": False, "loss": {"class_path": "torch.nn.Linear"}},
}


@pytest.fixture(autouse=True)
def changes(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Former(
        name="HORDE",
        renamed={"dtype": ("products", {None: "full", "bf16": "bfloat16"})},
        left={"seed": 0},
        added={"mean": False},
    )
    monkeypatch.setattr(former, "CLASSES", {"HORDELoss": described})
    monkeypatch.setattr(
        former,
        "MODULES",
        {"pml_regularizers.losses.horde_loss": "pml_regularizers.losses.horde_loss"},
    )


def configured(description: dict[str, Any]) -> dict[str, Any]:
    return {"losses": [{"loss": description, "weight": 1.0}]}


def test_a_class_that_changed_is_the_same_setting() -> None:
    assert identity(NEW) == OLD == identity(OLD)
    assert config_changes(configured(OLD), configured(NEW)) == []
    assert settings_of_results(configured(OLD)) == settings_of_results(configured(NEW))
    outer = {"class_path": "pytorch_metric_learning.Any", "init_args": {"parts": [NEW]}}
    assert identity(outer)["init_args"]["parts"] == [OLD]
    other = {"class_path": "elsewhere.HORDELoss", "init_args": {"dtype": None, "mean": False}}
    assert identity(other) == other


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [("dtype", "bf16", "products"), ("mean", True, "mean"), ("other", 3, "other")],
)
def test_another_value_is_another_setting(name: str, value: Any, key: str) -> None:
    changed = {**NEW, "init_args": {**NEW["init_args"], name: value}}
    (change,) = config_changes(configured(NEW), configured(changed))
    assert change.key == f"losses[0].loss.init_args.{key}"


@pytest.mark.parametrize("name", sorted(former.CLASSES))
def test_a_former_description_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded runs have it."""
    monkeypatch.undo()
    before = former.CLASSES[name]
    arguments = {kept: next(iter(values.values()), 1) for kept, values in before.renamed.values()}
    assert before.arguments(before.arguments(arguments)) == before.arguments(arguments)


def test_a_stated_rate_of_the_boundary_is_the_one_that_was_unsaid() -> None:
    stated = {"loss.beta": {"lr": 5e-4, "weight_decay": 0.0}}
    other = {"loss.beta": {"lr": 1e-3, "weight_decay": 0.0}}
    assert identity({"overrides": stated}) == {"overrides": {}}
    assert identity({"overrides": other}) == {"overrides": other}
