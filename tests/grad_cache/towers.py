"""Encoders for the tests of gradient caching, and the oracle: the same chunks with gradient, and one backward."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.grad_cache.chunks import call, cut

VOCABULARY, WIDTH, TOKENS = 50, 16, 6

ROUNDING = 1e-5
"""How far two runs of a tower in fp32 may lie apart (`gap`) that add up the same terms in another order, which is that
of the machine: its vectors, threads and libraries. A gradient is a sum of up to some thousand terms, and each run is
off by about the root of that: 64 roundings of 6e-8. A wrong gradient is off by more than 1e-3."""


class Tower(nn.Module):
    """A small transformer over token ids, with dropout; its features are unit vectors."""

    def __init__(self, seed: int = 0, *, dropout: float = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
            self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.layer(self.words(input_ids), src_key_padding_mask=mask == 0)
        weights = mask.unsqueeze(2).to(x.dtype)
        return F.normalize(self.out((x * weights).sum(1) / weights.sum(1)), dim=1)


class Normed(nn.Module):
    """A tower with batch statistics."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.tower = Tower(seed)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.normalize(self.norm(self.tower(input_ids)), dim=1)


def ids_of(n: int, seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (n, TOKENS), generator=torch.Generator().manual_seed(seed))


def padded(n: int, seed: int) -> dict[str, Tensor]:
    """As a tokenizer returns it."""
    lengths = torch.randint(1, TOKENS + 1, (n, 1), generator=torch.Generator().manual_seed(seed + 1))
    return {"input_ids": ids_of(n, seed), "attention_mask": (torch.arange(TOKENS) < lengths).long()}


def oracle(
    encoders: Sequence[Callable[..., Any]],
    loss: Callable[..., Any],
    inputs: Sequence[Any],
    sizes: Sequence[int],
    **keywords: Any,
) -> Tensor:
    """What a step must equal: `step` may differ in the order of sums only."""
    features = [
        torch.cat([call(encoder, chunk) for chunk in cut(x, size, "input")])
        for encoder, x, size in zip(encoders, inputs, sizes, strict=True)
    ]
    value: Tensor = loss(*features, **keywords)
    value.backward()
    return value.detach()


def twins(*modules: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Two copies of all; modules that are shared stay shared."""
    return copy.deepcopy(list(modules)), copy.deepcopy(list(modules))


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def gap(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """The largest difference of any entry over the largest entry; both lack the same gradients."""
    assert [g is None for g in got] == [g is None for g in want]
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True) if a is not None and b is not None]
    assert pairs
    largest = max(float(b.abs().max()) for _, b in pairs)
    assert largest > 0
    return max(float((a - b).abs().max()) for a, b in pairs) / largest
