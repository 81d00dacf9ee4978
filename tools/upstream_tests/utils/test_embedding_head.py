import unittest

import torch

from pytorch_metric_learning.utils.embedding_head import EmbeddingHead

from .. import TEST_DEVICE, TEST_DTYPES


class TestEmbeddingHead(unittest.TestCase):
    def test_maps_and_tokens(self):
        torch.manual_seed(10)
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            maps = torch.randn(2, 5, 3, 4, dtype=dtype, device=TEST_DEVICE)
            tokens = maps.flatten(2).transpose(1, 2)
            for pool, pooled in [
                ("avg", maps.mean(dim=(2, 3))),
                ("max", maps.flatten(2).max(dim=2).values),
            ]:
                head = EmbeddingHead(5, 6, pool=pool).to(TEST_DEVICE, dtype)
                correct = torch.nn.functional.normalize(head.fc(pooled))
                for x in (maps, maps.permute(0, 2, 3, 1), tokens):
                    self.assertTrue(torch.allclose(head(x), correct, atol=1e-5))

    def test_mask(self):
        tokens = torch.randn(2, 4, 5, device=TEST_DEVICE)
        mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
        head = EmbeddingHead(5, 6).to(TEST_DEVICE)
        embeddings = head(tokens, mask.to(TEST_DEVICE))
        self.assertTrue(torch.allclose(embeddings[:1], head(tokens[:1, :2]), atol=1e-5))

    def test_unknown_word(self):
        with self.assertRaises(ValueError):
            EmbeddingHead(5, 6, pool="mean")
