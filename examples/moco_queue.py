"""A queue of keys and a momentum encoder, as in MoCo, with the other keys of the batch as negatives too.

    python examples/moco_queue.py

As in MoCo, a slowly moving copy of the encoder computes the keys, and a queue keeps those of earlier batches. MoCo's
loss uses only the queue as negatives; here the other keys of the batch are negatives as well, as in cross-batch
memories. For MoCo's own loss see
`contratile.integrations.lightly.NTXentLoss(temperature, memory_bank_size=(keys, features))`.
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
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.5)
    for step in range(steps):
        data = torch.randn(batch, 64)
        query = F.normalize(encoder(data + 0.3 * torch.randn_like(data)), dim=1)
        key = F.normalize(slow(data + 0.3 * torch.randn_like(data)), dim=1)
        old = queue.keys()
        loss = ct.info_nce(query, key, 10.0, extra_keys=old)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        queue.enqueue(key)
        for mine, other in zip(slow.parameters(), encoder.parameters(), strict=True):
            mine.lerp_(other.detach(), 0.01)
        print(f"step {step}: loss {loss.item():.4f} against {len(key) + len(old)} keys")


if __name__ == "__main__":
    main()
