"""Features that can be truncated: the loss summed over the first 4, 8, 16 and 64 entries, in one product.

python examples/matryoshka.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contratile as ct

DIMS = (4, 8, 16, 64)


def train(dims: tuple[int, ...], pairs: int = 500) -> list[float]:
    """The share of pairs found first, by how many entries of a feature are compared."""
    torch.manual_seed(0)
    source = torch.randn(pairs, 32)
    left, right = (torch.cat([source, torch.randn(pairs, 32)], dim=1) for _ in range(2))
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimiser = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in range(60):
        loss = ct.clip_loss(encoder(left), encoder(right), 20.0, matryoshka_dims=dims)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def cut(x: Tensor, dim: int) -> Tensor:
        return F.normalize(encoder(x).detach()[:, :dim], dim=1)

    return [ct.retrieval_metrics(cut(left, dim), cut(right, dim))["image_to_text_R@1"] for dim in DIMS]


def main() -> None:
    for dims in ((64,), DIMS):
        found = ", ".join(f"{dim}: {share:.2f}" for dim, share in zip(DIMS, train(dims), strict=True))
        print(f"trained with {dims}: R@1 by dimension {found}")


if __name__ == "__main__":
    main()
