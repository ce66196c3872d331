"""Losses of today's embedding models: GTE's four directions, and harder negatives that weigh more.

    python examples/embedding_model.py

All of it in linear memory, the symmetric scores computed once.
"""

import torch
from torch import nn
from torch.nn import functional as F

import contratile as ct

GTE = ct.InfoNCE(20.0, directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"))
LLAVE = ct.InfoNCE(20.0, hardness_mode="in_batch_negatives", hardness_strength=9.0)
EMBEDDING_GEMMA = ct.InfoNCE(20.0, hardness_mode="hard_negatives", hardness_strength=5.0, share_hard_negatives=True)


def main(pairs: int = 600, steps: int = 8) -> None:
    torch.manual_seed(0)
    answer, noise = torch.randn(pairs, 64), torch.randn(3, pairs, 64)
    question, document, confusing = answer + 0.5 * noise[0], answer + 0.5 * noise[1], answer + 1.5 * noise[2]
    for name, loss_fn in (("GTE", GTE), ("LLaVE", LLAVE), ("EmbeddingGemma", EMBEDDING_GEMMA)):
        torch.manual_seed(1)
        encoder = nn.Linear(64, 32)
        optimiser = torch.optim.Adam(encoder.parameters(), lr=0.02)
        for step in range(steps):
            query, key, hard = (F.normalize(encoder(x), dim=1) for x in (question, document, confusing))
            loss = loss_fn(query, key, hard_negatives=hard.unsqueeze(1))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if step in (0, steps - 1):
                print(f"{name}, step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
