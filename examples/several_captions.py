"""Several captions of one image: left out of its negatives, or positives too.

    python examples/several_captions.py

Each image is in the batch three times, cropped in three ways, each time with another caption. Without ids the other two
captions are its negatives, and training pushes them away.
"""

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def train(images: int, captions: int, **options: object) -> float:
    """Train two encoders. The mean cosine of images with all of their captions."""
    torch.manual_seed(0)
    ids = torch.arange(images).repeat_interleave(captions)
    content = torch.randn(images, 16)[ids]
    crops, words = (torch.cat([content, torch.randn(len(ids), 16)], dim=1) for _ in range(2))
    left, right = nn.Linear(32, 16), nn.Linear(32, 16)
    optimiser = torch.optim.Adam([*left.parameters(), *right.parameters()], lr=0.01)
    for _ in range(60):
        image, text = F.normalize(left(crops), dim=1), F.normalize(right(words), dim=1)
        loss = ct.clip_loss(image, text, 20.0, **({"ids": ids} | options if options else {}))  # type: ignore[call-overload]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return float((image @ text.T)[ids.unsqueeze(1) == ids].mean().detach())


def main(images: int = 100, captions: int = 3) -> None:
    found = {
        "without ids": train(images, captions),
        "left out": train(images, captions, same_id="exclude"),
        "positives": train(images, captions, same_id="positive"),
    }
    print(", ".join(f"{name}: cosine {cosine:.3f}" for name, cosine in found.items()))


if __name__ == "__main__":
    main()
