"""SigLIP: the sigmoid loss with a learned scale and bias.

python examples/siglip_step.py
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def main(pairs: int = 1024, steps: int = 5) -> None:
    torch.manual_seed(0)
    common = torch.randn(pairs, 64)
    images, texts = (common + 0.5 * torch.randn(pairs, 64) for _ in range(2))
    towers = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
    log_scale, bias = nn.Parameter(torch.tensor(math.log(10.0))), nn.Parameter(torch.tensor(-10.0))
    optimiser = torch.optim.Adam([*towers.parameters(), log_scale, bias], lr=1e-2)
    for step in range(steps):
        image, text = (F.normalize(tower(x), dim=1) for tower, x in zip(towers, (images, texts), strict=True))
        loss = ct.siglip_loss(image, text, log_scale.exp(), bias)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
