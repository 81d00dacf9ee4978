import math
import unittest

import torch
import torch.nn.functional as F

from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import CosFaceLoss, JRSLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import SumReducer

from .. import TEST_DEVICE, TEST_DTYPES


def squared_distance(x, i, j):
    return torch.sum((x[i] - x[j]) ** 2)


def correct_losses(representations, num_kernels, labels):
    n = len(labels)
    pairs = [(i, j) for i in range(n) for j in range(n)]
    bandwidths = []
    for x in representations:
        distances = [squared_distance(x, i, j).item() for i, j in pairs if i != j]
        bandwidths.append(sum(distances) / len(distances))
    output = []
    for i, j in pairs:
        if labels[i] == labels[j]:
            continue
        similarity = 1
        for x, bandwidth, num in zip(representations, bandwidths, num_kernels):
            scales = {1: [1], 2: [0.5, 1], 3: [0.5, 1, 2]}[num]
            d = squared_distance(x, i, j)
            kernels = [torch.exp(-d / (bandwidth * scale)) for scale in scales]
            similarity = similarity * sum(kernels) / num
        output.append(similarity)
    return output


class TestJRSLoss(unittest.TestCase):
    def test_jrs_loss(self):
        torch.manual_seed(3459)
        labels = torch.tensor([3, 3, 0, 0, 0, 1], device=TEST_DEVICE)
        for dtype in TEST_DTYPES:
            rtol = 1e-2 if dtype == torch.float16 else 1e-5
            kwargs = {"requires_grad": True, "dtype": dtype, "device": TEST_DEVICE}
            embeddings = torch.randn(6, 4, **kwargs)
            pooled = torch.randn(6, 7, **kwargs)
            logits = torch.randn(6, 3, **kwargs)
            for features, num_kernels in [
                ([], [3]),
                ([pooled], [2, 1]),
                ([pooled, logits], [3, 3, 1]),
            ]:
                representations = [F.normalize(embeddings)] + features
                correct = correct_losses(representations, num_kernels, labels)
                self.assertEqual(len(correct), 22)
                for reducer, correct_loss in [
                    (None, sum(correct) / len(correct)),
                    (SumReducer(), sum(correct)),
                ]:
                    loss_func = JRSLoss(num_kernels=num_kernels, reducer=reducer)
                    loss = loss_func(embeddings, labels, features=features)
                    self.assertTrue(torch.isclose(loss, correct_loss, rtol=rtol))

                    inputs = [embeddings] + features
                    grads = torch.autograd.grad(loss, inputs)
                    correct_grads = torch.autograd.grad(
                        correct_loss, inputs, retain_graph=True
                    )
                    if dtype == torch.float16:
                        continue
                    for x, y in zip(grads, correct_grads):
                        self.assertTrue(torch.any(y != 0))
                        self.assertTrue(torch.allclose(x, y, rtol=1e-3, atol=1e-5))

    def test_scale_of_features_has_no_effect(self):
        torch.manual_seed(591)
        embeddings, labels = torch.randn(6, 4), torch.arange(6) % 3
        class_loss = CosFaceLoss(3, 4, scale=20)
        logits = class_loss.get_logits(embeddings)
        loss_func = JRSLoss(num_kernels=[3, 1])
        loss = loss_func(embeddings, labels, features=[logits])
        correct_loss = loss_func(embeddings, labels, features=[logits / 20])
        self.assertTrue(torch.isclose(loss, correct_loss))
        loss.backward()
        self.assertTrue(torch.any(class_loss.W.grad != 0))

    def test_indices_tuple(self):
        torch.manual_seed(591)
        embeddings, labels = torch.randn(6, 4), torch.arange(6) % 3
        a, p, n = BatchHardMiner()(embeddings, labels)
        loss_func = JRSLoss()
        loss = loss_func(embeddings, labels, (a, p, n))
        self.assertFalse(torch.isclose(loss, loss_func(embeddings, labels)))
        # pairs and triplets, with and without labels
        for indices_tuple in [(a, p, n), (a, p, a, n)]:
            for x in [labels, None]:
                self.assertTrue(
                    torch.isclose(loss_func(embeddings, x, indices_tuple), loss)
                )

    def test_large_batch(self):
        torch.manual_seed(591)
        labels = torch.arange(300) % 4
        for dtype in TEST_DTYPES:
            embeddings = torch.randn(300, 4, dtype=dtype, device=TEST_DEVICE)
            features = [embeddings * 10]
            loss = JRSLoss()(embeddings, labels, features=features)
            correct_loss = JRSLoss()(
                embeddings.double(), labels, features=[features[0].double()]
            )
            self.assertTrue(torch.isclose(loss.double(), correct_loss, rtol=1e-2))

    def test_identical_embeddings(self):
        embeddings = torch.ones(4, 2, requires_grad=True)
        loss = JRSLoss()(embeddings, torch.tensor([0, 0, 1, 1]))
        loss.backward()
        self.assertTrue(math.isclose(loss.item(), 1))
        self.assertTrue(torch.all(embeddings.grad == 0))

    def test_with_one_class(self):
        for dtype in TEST_DTYPES:
            for batch_size in [1, 3]:
                embeddings = torch.randn(
                    batch_size, 4, requires_grad=True, dtype=dtype, device=TEST_DEVICE
                )
                loss = JRSLoss()(embeddings, torch.ones(batch_size, dtype=torch.long))
                loss.backward()
                self.assertEqual(loss, 0)
                self.assertTrue(torch.all(embeddings.grad == 0))

    def test_unsupported(self):
        embeddings, labels = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
        loss_func = JRSLoss()
        with self.assertRaises(ValueError):
            loss_func(embeddings)
        with self.assertRaises(ValueError):
            loss_func(embeddings, labels, ref_emb=torch.randn(4, 2), ref_labels=labels)
        for features in [torch.randn(4, 4, 4), [embeddings[:2]]]:
            with self.assertRaises(ValueError):
                loss_func(embeddings, labels, features=features)
        with self.assertRaises(ValueError):
            JRSLoss(num_kernels=[3, 1])(embeddings, labels)
        with self.assertRaises(AssertionError):
            JRSLoss(distance=CosineSimilarity())
