"""SimCLR: `nt_xent` of two noisy views of every example, with a learned temperature.

python examples/simclr_views.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def main(examples: int = 1024, width: int = 32, steps: int = 5) -> None:
    torch.manual_seed(0)
    data = torch.randn(examples, 64)
    encoder = nn.Linear(64, width)
    log_temperature = nn.Parameter(torch.tensor(0.5).log())
    optimiser = torch.optim.Adam([*encoder.parameters(), log_temperature], lr=1e-2)
    for step in range(steps):
        z1, z2 = (F.normalize(encoder(data + 0.3 * torch.randn_like(data)), dim=1) for _ in range(2))
        loss, stats = ct.nt_xent(z1, z2, log_temperature.exp(), return_stats=True)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss.item():.4f}, top-1 {stats.row_top1.item():.3f}")


if __name__ == "__main__":
    main()
