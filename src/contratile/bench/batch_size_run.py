"""One training run of `bench.batch_size`: small towers from scratch on pairs in memory, and their retrieval afterwards.

    found = train(pairs, size=3072, batch=512, samples=131072, lr=3e-3, seed=0)
    found["recall_10"]

Every run of a source sees the same number of samples: a batch twice as large means half as many steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.bench.batch_size_data import PairData, PairTensors
from contratile.losses.functional import clip_loss
from contratile.metrics import retrieval_metrics

FEATURES = 64
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; afterwards it falls to 0 as a cosine."""
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.98)
SCALE, MAX_SCALE = 1 / 0.07, 100.0


class Drawing(nn.Module):
    """Features of grey 32 x 32 drawings by two strided convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 4, 4),
            nn.GELU(),
            nn.Conv2d(32, 64, 2, 2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(1024, FEATURES),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.layers(1 - pixels.float() / 255)
        return features


class Words(nn.Module):
    """Features of token ids [n, T] by their mean embedding and a small network; word order is not used."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(vocabulary, 128, mode="mean", padding_idx=0)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, FEATURES))

    def forward(self, ids: Tensor) -> Tensor:
        features: Tensor = self.layers(self.embed(ids))
        return features


class SmallTowers(nn.Module):
    """Two encoders and the learned logarithm of the scale."""

    def __init__(self, data: PairData) -> None:
        super().__init__()
        self.left = Drawing() if data.name == "icons" else Words(data.vocabulary)
        self.right = Words(data.vocabulary)
        self.log_scale = nn.Parameter(torch.tensor(math.log(SCALE)))

    def features(self, pairs: PairTensors) -> tuple[Tensor, Tensor]:
        """Unit features of both sides."""
        return F.normalize(self.left(pairs.left), dim=1), F.normalize(self.right(pairs.right), dim=1)


def train(data: PairData, *, size: int, batch: int, samples: int, lr: float, seed: int) -> dict[str, float]:
    """Train on the first `size` pairs and measure retrieval among the test pairs.

    Returns:
        recall_1, recall_10 and mean_rank, means of both directions, and the loss of the last step.
    """
    torch.manual_seed(seed)
    towers = SmallTowers(data)
    steps = samples // batch
    optimizer = torch.optim.AdamW(towers.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    order, pairs = torch.empty(0, dtype=torch.long), data.train.rows(slice(size))
    loss = torch.tensor(math.nan)
    for _ in range(steps):
        while len(order) < batch:  # a new epoch
            order = torch.cat([order, torch.randperm(size)])
        chosen, order = pairs.rows(order[:batch]), order[batch:]
        scale = towers.log_scale.exp().clamp(max=MAX_SCALE)
        left, right = towers.features(chosen)
        loss = clip_loss(left, right, scale, ids=chosen.ids, group=None)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
        schedule.step()
    return {**test(towers, data.test), "loss": loss.item()}


def rate(step: int, steps: int) -> float:
    """The factor of the learning rate at a step."""
    rising = max(1, round(WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising))) / 2


def test(towers: SmallTowers, pairs: PairTensors) -> dict[str, float]:
    """Retrieval in both directions, averaged."""
    with torch.no_grad():
        left, right = towers.features(pairs)
        found = retrieval_metrics(left, right, (1, 10))
    sides = "image_to_text", "text_to_image"
    names = {"recall_1": "R@1", "recall_10": "R@10", "mean_rank": "mean_rank"}
    return {ours: sum(found[f"{side}_{theirs}"] for side in sides) / 2 for ours, theirs in names.items()}
