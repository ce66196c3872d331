"""A two-tower recommender: popular items are in most batches, and the logQ correction makes up for that.

    python examples/recommender.py

Items are drawn by their popularity, so a popular one is a negative far more often than it should be. `key_bias` adds
-log q to its scores, q being how often it is drawn. Items that users of a batch share are positives of each other's
users, so `ids` leaves them out.
"""

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct


def train(users: int, items: int, *, correct: bool, steps: int = 150, batch: int = 512, width: int = 16) -> float:
    """The cross-entropy over all items after training."""
    torch.manual_seed(0)
    taste, kind = torch.randn(users, 8), torch.randn(items, 8)
    popularity = 1 / torch.arange(1, items + 1)
    chance = (popularity.log() + taste @ kind.T).softmax(1)  # what each user takes
    q = chance.mean(0)
    user, item = nn.Embedding(users, width), nn.Embedding(items, width)
    optimiser = torch.optim.Adam([*user.parameters(), *item.parameters()], lr=0.03)
    for _ in range(steps):
        who = torch.randint(users, (batch,))
        what = torch.multinomial(chance[who], 1).squeeze(1)
        key_bias = -q[what].log() if correct else None
        loss = ct.info_nce(user(who), item(what), ids=(who.new_full((batch,), -1), what), key_bias=key_bias)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    scores = (user.weight @ item.weight.T).detach()
    return float(F.cross_entropy(scores, chance))


def main(users: int = 400, items: int = 300) -> None:
    plain, corrected = (train(users, items, correct=correct) for correct in (False, True))
    print(f"cross-entropy over all items: {plain:.3f} without, {corrected:.3f} with the correction")


if __name__ == "__main__":
    main()
