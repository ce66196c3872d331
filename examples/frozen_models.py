"""A frozen model next to the one that is trained: as a guide that drops false negatives, and as a teacher.

    python examples/frozen_models.py

The data has many near-duplicates. The frozen model knows them: as a guide it says which pairs are no negatives, as a
teacher how similar all pairs should be.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contratile as ct


def train(left: Tensor, right: Tensor, topic: Tensor, **frozen: object) -> float:
    """The mean cosine of pairs of one topic after training."""
    torch.manual_seed(1)
    encoder = nn.Linear(left.shape[1], 16)
    optimiser = torch.optim.Adam(encoder.parameters(), lr=0.01)
    for _ in range(60):
        query, key = (F.normalize(encoder(x), dim=1) for x in (left, right))
        loss = ct.clip_loss(query, key, 20.0, **frozen)  # type: ignore[call-overload]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    scores = F.normalize(encoder(left), dim=1) @ F.normalize(encoder(right), dim=1).T
    return float(scores[topic.unsqueeze(1) == topic].mean().detach())


def main(pairs: int = 300, topics: int = 60) -> None:
    torch.manual_seed(0)
    topic = torch.arange(pairs) % topics
    meaning = torch.randn(topics, 16)[topic]
    left, right = (torch.cat([meaning, torch.randn(pairs, 16)], dim=1) for _ in range(2))
    known = tuple(F.normalize(meaning + 0.05 * torch.randn(pairs, 16), dim=1) for _ in range(2))
    found = {
        "alone": train(left, right, topic),
        "with a guide": train(left, right, topic, guide=known, guide_margin=0.1),
        "with a teacher": train(left, right, topic, teacher=(*known, 20.0), teacher_weight=4.0),
    }
    print(", ".join(f"{name}: cosine {cosine:.3f}" for name, cosine in found.items()))


if __name__ == "__main__":
    main()
