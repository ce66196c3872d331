"""MoCo: a queue of keys, and a slowly moving copy of the encoder that computes them.

    python examples/moco_queue.py

The keys of earlier batches are the negatives, and no other key of the batch is. Without `in_batch_negatives=False`
these are negatives as well, as in cross-batch memories.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def main(batch: int = 256, steps: int = 16) -> None:
    torch.manual_seed(0)
    encoder = nn.Linear(64, 32)
    slow = copy.deepcopy(encoder).requires_grad_(False)
    queue = ct.MemoryQueue(1024, 32)
    queue.enqueue(F.normalize(torch.randn(1024, 32), dim=1))
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.5)
    for step in range(steps):
        data = torch.randn(batch, 64)
        query = F.normalize(encoder(data + 0.3 * torch.randn_like(data)), dim=1)
        key = F.normalize(slow(data + 0.3 * torch.randn_like(data)), dim=1)
        old = queue.keys()
        loss = ct.info_nce(query, key, 10.0, extra_keys=old, in_batch_negatives=False)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        queue.enqueue(key)
        for mine, other in zip(slow.parameters(), encoder.parameters(), strict=True):
            mine.lerp_(other.detach(), 0.01)
        print(f"step {step}: loss {loss.item():.4f} against {len(old)} keys")


if __name__ == "__main__":
    main()
