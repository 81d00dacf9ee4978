"""The runner with its steps traced: each process saves image ids, losses and gradients to $TRACE-RANK."""

import os
import sys

import torch

from benchmarks.run import main
from tests.benchmarks.runs import traced

if __name__ == "__main__":
    with traced() as rows:
        status = main(sys.argv[1:])
    torch.save(rows, f"{os.environ['TRACE']}-{os.environ.get('RANK', '0')}")
    sys.exit(status)
