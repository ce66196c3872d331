"""Dense retrieval with more documents than queries, and queries that share a document.

    python examples/retrieval_labels.py

`labels[i]` is the index of the document for query i; all other documents are its negatives.
"""

import torch
from torch.nn import functional as F

import contratile as ct


def main(queries: int = 1000, documents: int = 5000, width: int = 128) -> None:
    torch.manual_seed(0)
    labels = torch.randint(documents, (queries,))
    document = F.normalize(torch.randn(documents, width), dim=1)
    query = F.normalize(document[labels] + 0.08 * torch.randn(queries, width), dim=1).requires_grad_()

    loss = ct.info_nce(query, document, scale=20.0, labels=labels)
    loss.backward()
    dense = F.cross_entropy(20.0 * query.detach() @ document.T, labels)
    print(f"loss {loss.item():.6f}, dense {dense.item():.6f}, gradient norm {query.grad.norm().item():.4f}")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
