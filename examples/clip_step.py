"""A few optimizer steps of a two-tower model at a batch size whose score matrix would not fit into memory.

    python examples/clip_step.py                 # 16,384 pairs
    python examples/clip_step.py 100000          # 100,000 pairs: the score matrix alone would be 37 GiB

The towers are linear layers, so that the loss dominates the memory.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def main(batch: int = 16384, features: int = 64, width: int = 32) -> None:
    torch.manual_seed(0)
    image_tower, text_tower = nn.Linear(features, width), nn.Linear(features, width)
    log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    optimiser = torch.optim.AdamW([*image_tower.parameters(), *text_tower.parameters(), log_scale], lr=1e-2)
    loss_fn = ct.ClipLoss()

    common = torch.randn(batch, features)
    images, texts = common + 0.5 * torch.randn_like(common), common + 0.5 * torch.randn_like(common)
    print(f"plan: {ct.plan_tiles(batch, batch, width)}; the scores would take {batch**2 * 4 / 2**30:.1f} GiB")
    for step in range(3):
        image = F.normalize(image_tower(images), dim=1)
        text = F.normalize(text_tower(texts), dim=1)
        loss = loss_fn(image, text, log_scale.exp())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(
            f"step {step}: loss {loss.item():.4f} (log N = {math.log(batch):.4f}), scale {log_scale.exp().item():.2f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
