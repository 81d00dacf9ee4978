import itertools
import unittest

import torch
import torch.nn.functional as F

from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import (
    ArcFaceLoss,
    ContrastiveLoss,
    CrossBatchMemory,
    HORDELoss,
    TripletMarginLoss,
)
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import SumReducer
from pytorch_metric_learning.regularizers import LpRegularizer

from .. import TEST_DEVICE, TEST_DTYPES


def correct_orders(loss_func, features):
    """Each moment by itself, without the recursion, for features (N, C, H, W)"""
    output = []
    for k in range(2, loss_func.order + 1):
        moments = []
        for image in features:
            total = 0
            for h in range(image.shape[1]):
                for w in range(image.shape[2]):
                    product = 1
                    for i in range(k):
                        projection = loss_func.projections[i].t()
                        product = product * torch.mv(projection, image[:, h, w])
                    total = total + product
            moments.append(total / (image.shape[1] * image.shape[2]))
        moments = torch.stack(moments)
        if loss_func.projections[0].requires_grad:
            embedder = loss_func.embedders[k - 2].weight
            moments = torch.matmul(moments, embedder.t())
        output.append(F.normalize(moments))
    return output


class TestHORDELoss(unittest.TestCase):
    def get_data(self, dtype=torch.float32, device=torch.device("cpu")):
        torch.manual_seed(3459)
        embeddings = torch.randn(6, 4, requires_grad=True, dtype=dtype, device=device)
        labels = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
        features = torch.randn(
            6, 5, 3, 2, requires_grad=True, dtype=dtype, device=device
        )
        return embeddings, labels, features

    def test_horde_loss(self):
        for dtype in TEST_DTYPES:
            rtol = 1e-2 if dtype == torch.float16 else 1e-5
            embeddings, labels, features = self.get_data(dtype, TEST_DEVICE)
            for inner_loss in [
                ContrastiveLoss(),
                TripletMarginLoss(distance=CosineSimilarity(), reducer=SumReducer()),
            ]:
                for order, train in itertools.product([2, 3, 5], [True, False]):
                    loss_func = HORDELoss(
                        inner_loss,
                        5,
                        4,
                        order=order,
                        moment_dim=16,
                        train_projections=train,
                    )
                    loss_func = loss_func.to(TEST_DEVICE).type(dtype)
                    loss = loss_func(embeddings, labels, features=features)
                    orders = [embeddings] + correct_orders(loss_func, features)
                    self.assertIn(f"order_{len(orders)}", loss_func.sub_loss_names())
                    correct_loss = sum(inner_loss(x, labels) for x in orders)
                    self.assertTrue(torch.isclose(loss, correct_loss, rtol=rtol))

                    weights = list(loss_func.parameters())
                    inputs = [embeddings, features] + (weights if train else [])
                    grads = torch.autograd.grad(loss, inputs)
                    correct_grads = torch.autograd.grad(correct_loss, inputs)
                    if dtype == torch.float16:
                        continue
                    for x, y in zip(grads, correct_grads):
                        self.assertTrue(torch.any(y != 0))
                        self.assertTrue(torch.allclose(x, y, rtol=1e-3, atol=1e-4))

    def test_fixed_projections(self):
        embeddings, labels, features = self.get_data()
        loss_func = HORDELoss(
            ContrastiveLoss(), 5, 4, order=3, moment_dim=16, train_projections=False
        )
        for weight in loss_func.parameters():
            self.assertFalse(weight.requires_grad)
            self.assertTrue(torch.all(weight.abs() == 1))
            self.assertEqual(len(torch.unique(weight)), 2)
        for x in loss_func.get_high_order_embeddings(features):
            self.assertEqual(x.shape, (6, 16))

    def test_features(self):
        for dtype in TEST_DTYPES:
            rtol = 1e-2 if dtype == torch.float16 else 1e-5
            small, large = (1e-3, 1e3) if dtype == torch.float16 else (1e-6, 1e6)
            embeddings, labels, features = self.get_data(dtype, TEST_DEVICE)
            loss_func = HORDELoss(ContrastiveLoss(), 5, 4, order=3, moment_dim=16)
            loss_func = loss_func.to(TEST_DEVICE).type(dtype)
            correct_loss = loss_func(embeddings, labels, features=features)
            tokens = features.flatten(2).transpose(1, 2)
            for x in [tokens, features * small, features * large]:
                loss = loss_func(embeddings, labels, features=x)
                self.assertTrue(torch.isclose(loss, correct_loss, rtol=rtol))
            self.assertTrue(loss_func.features is None)

    def test_indices_tuple(self):
        embeddings, labels, features = self.get_data()
        inner_loss = TripletMarginLoss()
        loss_func = HORDELoss(inner_loss, 5, 4, order=3, moment_dim=16)
        indices_tuple = BatchHardMiner()(embeddings, labels)
        loss = loss_func(embeddings, labels, indices_tuple, features=features)
        orders = [embeddings] + loss_func.get_high_order_embeddings(features)
        correct_loss = sum(inner_loss(x, labels, indices_tuple) for x in orders)
        self.assertTrue(torch.isclose(loss, correct_loss))

    def test_inner_loss_of_each_order(self):
        embeddings, labels, features = self.get_data()
        inner_loss = ArcFaceLoss(num_classes=3, embedding_size=4)
        loss_func = HORDELoss(inner_loss, 5, 4, order=3, moment_dim=16)
        loss_func(embeddings, labels, features=features).backward()
        self.assertTrue(loss_func.losses[0] is inner_loss)
        grads = [x.W.grad for x in loss_func.losses]
        self.assertEqual(len(grads), 3)
        self.assertFalse(torch.allclose(grads[0], grads[1]))
        self.assertFalse(torch.allclose(grads[1], grads[2]))

        inner_loss = CrossBatchMemory(ContrastiveLoss(), 4, memory_size=12)
        loss_func = HORDELoss(inner_loss, 5, 4, order=3, moment_dim=16)
        loss_func(embeddings, labels, features=features)
        orders = [embeddings] + loss_func.get_high_order_embeddings(features)
        for inner_loss, x in zip(loss_func.losses, orders):
            self.assertTrue(torch.allclose(inner_loss.embedding_memory[:6], x))

    def test_embedding_regularizer(self):
        embeddings, labels, features = self.get_data()
        regularizer = LpRegularizer()
        loss_func = HORDELoss(
            ContrastiveLoss(),
            5,
            4,
            order=2,
            moment_dim=16,
            embedding_regularizer=regularizer,
            embedding_reg_weight=0.1,
        )
        loss = loss_func(embeddings, labels, features=features)
        orders = [embeddings] + loss_func.get_high_order_embeddings(features)
        correct_loss = sum(ContrastiveLoss()(x, labels) for x in orders)
        correct_loss += 0.1 * regularizer(embeddings)
        self.assertTrue(torch.isclose(loss, correct_loss))

    def test_unsupported(self):
        embeddings, labels, features = self.get_data()
        loss_func = HORDELoss(ContrastiveLoss(), 5, 4, order=2, moment_dim=16)
        with self.assertRaises(ValueError):
            loss_func(embeddings, labels)
        for x in [features[:3], features[:, :, 0, 0]]:
            with self.assertRaises(ValueError):
                loss_func(embeddings, labels, features=x)
        with self.assertRaises(ValueError):
            loss_func(
                embeddings,
                labels,
                ref_emb=torch.randn(6, 4),
                ref_labels=labels,
                features=features,
            )
        for kwargs in [
            {"order": 1},
            {"distance": CosineSimilarity()},
            {"reducer": SumReducer()},
        ]:
            with self.assertRaises(ValueError):
                HORDELoss(ContrastiveLoss(), 5, 4, **kwargs)
