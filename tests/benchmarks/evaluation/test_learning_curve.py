"""A learning curve over photographs per class, and what its page says of it."""

import pytest
import torch
from torch import nn

from benchmarks.evaluation.learning_curve import learning_curve
from benchmarks.evaluation.tester import measure
from benchmarks.reporting.study_sections import more_photographs, sentence
from pml_regularizers import whitening_init_


def images(classes: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes whose images differ most in directions that tell nothing of the class."""
    labels = torch.arange(classes).repeat_interleave(each)
    nuisance = torch.randn(classes * each, 4) @ torch.randn(4, 48) * 3
    return torch.randn(classes, 48)[labels] + nuisance + torch.randn(classes * each, 48), labels


def test_the_curve_thins_both_kinds_of_classes_and_ends_with_all_images():
    train, test = images(8, 12), images(6, 12)
    curve = learning_curve(train, test, "whitened", 16)
    assert [(number, len(right)) for number, right in curve] == [(3, 10), (6, 10), (12, 1)]
    layer = whitening_init_(nn.Linear(48, 16, dtype=torch.float64), *train)
    rows = layer(test[0].double()).detach().float()
    assert curve[-1][1] == [100 * measure(rows, test[1], [1])["recall_at_1"]]
    means = [sum(right) / len(right) for _, right in curve]
    assert means == sorted(means) and means[0] + 5 < means[-1]
    assert learning_curve(images(4, 3), images(4, 3), "pca", 16)[0][0] == 3, "no half of three"


@pytest.mark.parametrize(
    ("before", "word"),
    [([71, 72], "will probably help"), ([60, 84], "may help"), ([75, 76], "hardly")],
)
def test_the_last_doubling_says_whether_more_photographs_help(before, word):
    told = sentence([(5, before), (10, [76])])
    assert told.startswith("With 5 photographs per class, the nearest one was right for ")
    assert "with 10, for 76" in told and word in told
    [section] = more_photographs([(5, before), (10, [76])], "untrained network")
    assert section.text.startswith(told) and len(section.table.rows) == 2
    assert more_photographs([(3, [50])], "untrained network") == []
