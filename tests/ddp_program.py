"""A process of a job of torchrun: two steps of SGD on its rows by a module in DistributedDataParallel.

Arguments: a checkpoint, and where process 0 writes the state dict.
"""

import sys

import torch

from areax.adapters import hf
from areax.adapters.torch.module import Model

ROWS = torch.arange(64).reshape(4, 16) % 12


def train(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = Model(*hf.load(sys.argv[1]))
    train(torch.nn.parallel.DistributedDataParallel(model), ROWS[2 * rank : 2 * rank + 2])
    if rank == 0:
        torch.save(model.state_dict(), sys.argv[2])
    torch.distributed.destroy_process_group()
