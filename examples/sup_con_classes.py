"""Supervised contrastive learning: every example of a class is a positive of every other.

python examples/sup_con_classes.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def main(examples: int = 2000, classes: int = 10, steps: int = 5) -> None:
    torch.manual_seed(0)
    labels = torch.randint(classes, (examples,))
    data = torch.randn(classes, 64)[labels] + torch.randn(examples, 64)
    encoder = nn.Linear(64, 16)
    optimiser = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    for step in range(steps):
        loss = ct.sup_con(F.normalize(encoder(data), dim=1), labels, temperature=0.1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
