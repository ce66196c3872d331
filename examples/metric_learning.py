"""pytorch-metric-learning's losses and those of Contratile: one import changes.

    python examples/metric_learning.py           # 160 embeddings for NT-Xent, 2048 for SupCon
    python examples/metric_learning.py 256 4096

The package's NT-Xent compares every positive pair with every negative pair: its memory grows with the cube of the
batch, so that its table is one of a small batch. The last line is a batch that only one of the two can do.
"""

import sys
from collections.abc import Callable

import torch
from torch import nn

from contratile.bench.before_after import print_table
from contratile.bench.contestants.loss import quiet
from contratile.integrations import pytorch_metric_learning as after

with quiet():
    from pytorch_metric_learning import losses as before


def step(loss: nn.Module, batch: int, width: int = 128) -> Callable[[], float]:
    """Two embeddings of each label."""
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
