"""Texts of `contratile bench cache`: random tokens, with the lengths of real texts.

texts = make_texts(512, "wordnet", seed=1)       # {"input_ids": [512, 71], "attention_mask": [512, 71]}
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from contratile.bench.contestants.cache_model import VOCABULARY, tokens

Lengths = Literal["equal", "wordnet", "long-tailed"]
LENGTHS: tuple[str, ...] = get_args(Lengths)
LONGEST = 256
"""Longer texts of the synthetic distribution are cut."""

_WORDNET = (
    "0 0 0 205 2272 4301 6597 7929 8444 8979 8251 7789 6971 6390 5809 5153 4645 4088 3671 3144 2724 2478 2180 "
    "1891 1627 1453 1260 1082 953 866 723 612 524 506 392 364 328 250 208 205 183 153 137 127 78 83 71 69 61 "
    "44 46 52 41 38 33 28 24 27 14 18 8 7 7 9 9 4 4 5 7 5 3 5 4 3 2 4 1 1 3 3 1 1 0 0 0 1 1 1 0 0 0 0 1 0 0 0 "
    "0 0 1 0 0 0 1 0 0 0 0 0 0 0 0 1 0 0 1 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1"
)
"""How many of WordNet's 116,697 definitions have 0, 1, 2, ... tokens of all-MiniLM-L6-v2, two special ones included."""


def make_texts(n: int, lengths: Lengths, *, seed: int) -> Any:
    """Token ids of n texts, with an attention mask if their lengths differ."""
    if lengths == "equal":
        return tokens(n, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if lengths == "wordnet":
        counts = torch.tensor([float(count) for count in _WORDNET.split()])
        sizes = torch.multinomial(counts, n, replacement=True, generator=generator)
    else:
        # Log-normal: the median text has 16 tokens, one of 40 has more than 100.
        sizes = (16 * torch.randn(n, generator=generator).mul(0.95).exp()).long().clamp(3, LONGEST)
    width = int(sizes.max())
    mask = (torch.arange(width) < sizes.unsqueeze(1)).long()
    ids = torch.randint(1, VOCABULARY, (n, width), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}


def cut_chunks(texts: Any, chunk: int) -> list[Any]:
    """Chunks in their order; with a mask, each as wide as its longest text."""
    if isinstance(texts, Tensor):
        return list(torch.split(texts, chunk))
    found = []
    for at in range(0, len(texts["input_ids"]), chunk):
        part = {name: x[at : at + chunk] for name, x in texts.items()}
        width = int(part["attention_mask"].sum(1).max())
        found.append({name: x[:, :width] for name, x in part.items()})
    return found
