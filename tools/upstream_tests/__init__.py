import os

import torch

TEST_DTYPES = [
    getattr(torch, name)
    for name in os.environ.get("TEST_DTYPES", "float16,float32,float64").split(",")
]
TEST_DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cuda"))
