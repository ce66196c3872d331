"""SimCLR as in lightly's tutorials with Contratile's loss: change an import.

    python examples/lightly_simclr.py            # 2048 pairs of views
    python examples/lightly_simclr.py 4096

The projection head is lightly's; random features stand for the output of a backbone.
"""

import sys
from collections.abc import Callable

import torch
from compare import print_table
from lightly.loss import NTXentLoss as Before
from lightly.models.modules import SimCLRProjectionHead
from torch import nn

from contratile.integrations.lightly import NTXentLoss  # was: from lightly.loss import NTXentLoss


def main(pairs: int = 2048) -> None:
    torch.manual_seed(0)
    head = SimCLRProjectionHead(64, 64, 128)
    common = torch.randn(pairs, 64)
    views = [common + 0.5 * torch.randn_like(common) for _ in range(2)]

    def step(criterion: nn.Module) -> Callable[[], float]:
        def call() -> float:
            head.zero_grad()
            z0, z1 = (head(view) for view in views)
            loss = criterion(z0, z1)
            loss.backward()
            return float(loss)

        return call

    steps = {"lightly": step(Before(temperature=0.5)), "contratile": step(NTXentLoss(temperature=0.5))}
    print_table(f"NTXentLoss, {pairs} pairs of views", steps)
    before, after = (step() for step in steps.values())
    print(f"loss before {before:.6f}, after {after:.6f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
