import os
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

from pytorch_metric_learning.losses import (
    ArcFaceLoss,
    ContrastiveLoss,
    CrossBatchMemory,
    ProxyAnchorLoss,
    SoftTripleLoss,
    SupConLoss,
    TripletMarginLoss,
)
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

BATCH_SIZE = 12
NUM_CLASSES = 3
EMBEDDING_SIZE = 4
LOSSES = {
    "contrastive": ContrastiveLoss,
    "triplet": TripletMarginLoss,
    "supcon": SupConLoss,
    "arcface": lambda: ArcFaceLoss(NUM_CLASSES, EMBEDDING_SIZE),
    "proxy_anchor": lambda: ProxyAnchorLoss(NUM_CLASSES, EMBEDDING_SIZE),
    "soft_triple": lambda: SoftTripleLoss(NUM_CLASSES, EMBEDDING_SIZE),
    "memory": lambda: CrossBatchMemory(ContrastiveLoss(), EMBEDDING_SIZE, 24),
}


def get_model_loss_and_batch(name):
    torch.manual_seed(591)
    model = torch.nn.Linear(5, EMBEDDING_SIZE).double()
    loss_fn = LOSSES[name]().double()
    inputs = torch.randn(BATCH_SIZE, 5, dtype=torch.float64)
    labels = torch.arange(BATCH_SIZE) % NUM_CLASSES
    return model, loss_fn, inputs, labels


def get_loss_and_gradients(loss, *modules):
    loss.backward()
    gradients = [p.grad.clone() for m in modules for p in m.parameters()]
    return loss.detach(), gradients


def wrap(module):
    has_parameters = len(list(module.parameters())) > 0
    return DDP(module) if has_parameters else module


def one_of_many(rank, world_size, folder):
    dist.init_process_group(
        "gloo",
        init_method="file://{}/rendezvous".format(folder),
        rank=rank,
        world_size=world_size,
    )
    output = {}
    n = BATCH_SIZE // world_size
    for name in LOSSES:
        model, loss_fn, inputs, labels = get_model_loss_and_batch(name)
        ddp_model = wrap(model)
        ddp_loss_fn = wrap(DistributedLossWrapper(loss_fn))
        inputs = inputs[rank * n : (rank + 1) * n]
        labels = labels[rank * n : (rank + 1) * n]
        loss = ddp_loss_fn(ddp_model(inputs), labels)
        output[name] = get_loss_and_gradients(loss, model, loss_fn)
    torch.save(output, os.path.join(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


# This runs on the CPU whatever TEST_DEVICE is
class TestDistributedGradients(unittest.TestCase):
    def test_equal_to_one_process(self):
        for world_size in [2, 3]:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(one_of_many, args=(world_size, folder), nprocs=world_size)
                outputs = [
                    torch.load(os.path.join(folder, str(rank)))
                    for rank in range(world_size)
                ]
            for name in LOSSES:
                model, loss_fn, inputs, labels = get_model_loss_and_batch(name)
                loss = loss_fn(model(inputs), labels)
                loss, gradients = get_loss_and_gradients(loss, model, loss_fn)
                for output in outputs:
                    self.helper(output[name], loss, gradients)

    def helper(self, output, correct_loss, correct_gradients):
        loss, gradients = output
        self.assertTrue(torch.isclose(loss, correct_loss, rtol=1e-10))
        self.assertEqual(len(gradients), len(correct_gradients))
        for x, y in zip(gradients, correct_gradients):
            self.assertTrue(torch.any(y != 0))
            self.assertTrue(torch.allclose(x, y, rtol=1e-8, atol=1e-10))
