import unittest

import torch
import torch.nn.functional as F

from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import ContrastiveLoss, HORDELoss, MultipleLosses
from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.utils.embedding_head import EmbeddingHead

from .. import TEST_DEVICE, TEST_DTYPES


def base_loss():
    return ContrastiveLoss(1, 0, distance=CosineSimilarity())


class TestHORDELoss(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(6)
        labels = torch.tensor([0, 0, 1, 1])
        for dtype in TEST_DTYPES:
            rtol = 1e-8 if dtype == torch.float64 else 1e-3
            loss_fn = HORDELoss(base_loss(), 5, 3, order=3, moment_dim=7)
            loss_fn.to(TEST_DEVICE)
            loss_fn.to(torch.float64 if dtype == torch.float64 else torch.float32)
            embeddings = torch.randn(
                4, 3, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            maps = torch.randn(
                4, 5, 2, 3, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss = loss_fn(embeddings, labels, features=maps)
            loss.backward()
            for parameter in loss_fn.parameters():
                self.assertTrue((parameter.grad != 0).any())

            W = [weight.detach().double() for weight in loss_fn.moments.weights()]
            E = {
                k: loss_fn.embeddings["order_{}".format(k)].weight.detach().double()
                for k in (2, 3)
            }
            correct = base_loss()(embeddings.detach().double(), labels)
            for k in (2, 3):
                z = torch.zeros(4, 7, dtype=torch.float64, device=TEST_DEVICE)
                for n in range(4):
                    for h in range(2):
                        for w in range(3):
                            x = maps.detach().double()[n, :, h, w]
                            phi = torch.ones_like(z[n])
                            for i in range(k):
                                phi = phi * (x @ W[i])
                            z[n] += phi / 6
                correct = correct + base_loss()(F.normalize(z @ E[k].t()), labels)
            self.assertTrue(torch.isclose(loss.double(), correct, rtol=rtol))

    def test_in_a_pipeline(self):
        head = EmbeddingHead(5, 3).to(TEST_DEVICE)
        horde = HORDELoss(base_loss(), 5, 3, order=3, moment_dim=7).to(TEST_DEVICE)
        loss_fn = MultipleLosses([horde.attach(head), ContrastiveLoss()])
        maps = torch.randn(4, 5, 2, 3, requires_grad=True, device=TEST_DEVICE)
        loss_fn(head(maps), torch.tensor([0, 0, 1, 1])).backward()
        self.assertTrue((maps.grad != 0).any())

    def test_one_class(self):
        loss_fn = HORDELoss(ContrastiveLoss(), 5, 3, order=3, moment_dim=7)
        loss_fn.to(TEST_DEVICE)
        maps = torch.randn(1, 5, 2, 3, requires_grad=True, device=TEST_DEVICE)
        embeddings = torch.randn(1, 3, requires_grad=True, device=TEST_DEVICE)
        loss = loss_fn(embeddings, torch.tensor([0]), features=maps)
        loss.backward()
        self.assertEqual(loss.item(), 0)
        for parameter in loss_fn.parameters():
            self.assertTrue((parameter.grad == 0).all())

    def test_errors(self):
        for base, kwargs in [
            (ContrastiveLoss(reducer=DoNothingReducer()), {}),
            (ContrastiveLoss(), {"order": 1}),
            (ContrastiveLoss(), {"reducer": DoNothingReducer()}),
        ]:
            with self.assertRaises(ValueError):
                HORDELoss(base, 5, 3, moment_dim=7, **kwargs)
