"""Options for dense retrieval: duplicates, mined negatives, hard negatives per query, false negatives, weights.

python examples/hard_negatives.py
"""

import torch
from torch.nn import functional as F

import contratile as ct


def main(pairs: int = 500, width: int = 64) -> None:
    torch.manual_seed(0)
    answers = torch.randint(200, (pairs,))  # queries with the same answer are not negatives of each other
    document = F.normalize(torch.randn(200, width), dim=1)[answers]
    query = F.normalize(document + 0.1 * torch.randn(pairs, width), dim=1).requires_grad_()
    mined = F.normalize(torch.randn(1000, width), dim=1)  # shared by all queries
    hard = F.normalize(document.unsqueeze(1) + 0.3 * torch.randn(pairs, 4, width), dim=2)  # four per query
    present = torch.rand(pairs, 4) > 0.25  # some queries have fewer than four
    weights = torch.rand(pairs)

    loss, stats = ct.info_nce(
        query,
        document,
        20.0,
        ids=answers,
        extra_keys=mined,
        hard_negatives=hard,
        hard_mask=present,
        margin=0.05,
        weights=weights,
        return_stats=True,
    )
    loss.backward()
    plain = ct.info_nce(query.detach(), document, 20.0)
    print(f"loss {loss.item():.4f} with options, {plain.item():.4f} without; mean rank {stats.row_rank.item():.2f}")


if __name__ == "__main__":
    main()
