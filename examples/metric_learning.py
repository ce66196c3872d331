"""The losses of pytorch-metric-learning and of Contratile: change an import.

    python examples/metric_learning.py           # 160 embeddings for NT-Xent, 2048 for SupCon
    python examples/metric_learning.py 256 4096

The package's NT-Xent compares every positive pair with every negative pair. Its memory grows with the cube of the
batch, so the comparison uses a small batch. The last table is a batch that only Contratile can do.
"""

import sys
from collections.abc import Callable

import torch
from compare import print_table
from pytorch_metric_learning import losses as before
from torch import nn

from contratile.integrations import pytorch_metric_learning as after


def step(loss: nn.Module, batch: int, width: int = 128) -> Callable[[], float]:
    """Forward and backward of embeddings with two examples per label."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(batch) // 2
    centres = torch.randn(batch, width, generator=random)
    embeddings = centres[labels] + torch.randn(batch, width, generator=random)
    embeddings.requires_grad_()

    def call() -> float:
        embeddings.grad = None
        value = loss(embeddings, labels)
        value.backward()
        return float(value.detach())

    return call


def main(nt_xent: int = 160, sup_con: int = 2048) -> None:
    for name, batch in (("NTXentLoss", nt_xent), ("SupConLoss", sup_con)):
        losses = {"pytorch-metric-learning": getattr(before, name)(), "contratile": getattr(after, name)()}
        steps = {package: step(loss, batch) for package, loss in losses.items()}
        print_table(f"{name}, {batch} embeddings", steps)
        old, new = (step() for step in steps.values())
        print(f"loss before {old:.6f}, after {new:.6f}")
    print_table(f"NTXentLoss, {sup_con} embeddings", {"contratile": step(after.NTXentLoss(), sup_con)})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
