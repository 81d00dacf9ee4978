import unittest
import warnings
from types import SimpleNamespace

from pytorch_metric_learning.losses import ArcFaceLoss
from pytorch_metric_learning.losses.variance_regularizer import VEMAttention
from pytorch_metric_learning.utils.embedding_head import EmbeddingHead
from pytorch_metric_learning.utils.optimizer_groups import (
    parameter_groups,
    warn_untrained,
)


class TestOptimizerGroups(unittest.TestCase):
    def test_groups(self):
        head = EmbeddingHead(5, 4, attention=VEMAttention)
        loss = ArcFaceLoss(3, 4)
        groups = parameter_groups(
            head, loss, lr=1e-5, loss_lr=1e-2, overrides={"model.fc": {"lr": 1e-4}}
        )
        rates = {group["name"]: group["lr"] for group in groups}
        attention = VEMAttention.optimizer_settings["lr"]
        self.assertEqual(
            rates, {"model.attention": attention, "model.fc": 1e-4, "loss": 1e-2}
        )
        self.assertEqual(sum(len(group["params"]) for group in groups), 3)
        with self.assertRaises(ValueError):
            parameter_groups(head, loss, lr=1e-5, overrides={"model.typo": {}})

    def test_warning(self):
        loss = ArcFaceLoss(3, 4)
        optimizer = SimpleNamespace(param_groups=[{"params": []}])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.assertEqual(warn_untrained(loss, optimizer), ["W"])
            self.assertEqual(len(caught), 1)
            optimizer.param_groups.append({"params": list(loss.parameters())})
            self.assertEqual(warn_untrained(loss, optimizer), [])
            self.assertEqual(len(caught), 1)
