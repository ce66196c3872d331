"""The torch backend where tensors are not on the CPU: on "meta", whose memory cannot be read.

What passes here mixes no devices and never waits to look at a value, as an accelerator would have to. Class sums
(`sup_con`, label smoothing, statistics) sort classes, which "meta" cannot; they are not seen here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct

N, D = 40, 8
HOW: dict[str, Any] = {"backend": "torch", "tile": 16}


def features(*shape: int) -> Tensor:
    return torch.empty(*(shape or (N, D)), device="meta", requires_grad=True)


def number(value: float) -> Tensor:
    return torch.tensor(float(value), device="meta", requires_grad=True)


IDS = torch.empty(N, dtype=torch.long, device="meta")
MASK = torch.empty(N, 3, dtype=torch.bool, device="meta")
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "learned scale": lambda x, y: ct.clip_loss(x, y, number(10), **HOW),
    "number": lambda x, y: ct.clip_loss(x, y, 10.0, **HOW),
    "scale on the CPU": lambda x, y: ct.clip_loss(x, y, torch.tensor(10.0), **HOW),
    "cache": lambda x, y: ct.clip_loss(x, y, 10.0, cache_bytes=4000, **HOW),
    "labels": lambda x, y: ct.info_nce(x, y, 10.0, labels=IDS, **HOW),
    "ids": lambda x, y: ct.clip_loss(x, y, 10.0, ids=IDS, **HOW),
    "margin": lambda x, y: ct.clip_loss(x, y, 10.0, margin=0.1, **HOW),
    "extra keys": lambda x, y: ct.clip_loss(x, y, 10.0, extra_keys=features(20, D), **HOW),
    "hard negatives": lambda x, y: ct.clip_loss(
        x, y, torch.tensor(10.0), hard_negatives=features(N, 3, D), hard_mask=MASK, **HOW
    ),
    "weights": lambda x, y: ct.clip_loss(x, y, 10.0, weights=torch.empty(N, device="meta"), **HOW),
    "nt_xent": lambda x, y: ct.nt_xent(x, y, number(0.1), **HOW),
    "siglip_loss": lambda x, y: ct.siglip_loss(x, y, number(10), number(-10), **HOW),
    "siglip_loss, numbers": lambda x, y: ct.siglip_loss(x, y, 10.0, -10.0, **HOW),
    "one set": lambda x, y: ct.pair_lse(x, None, number(10), **HOW)[0].sum() + y.sum(),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_or_mixed(case: str) -> None:
    x, y = features(), features()
    loss = CASES[case](x, y)
    assert loss.device.type == "meta" and loss.shape == ()
    loss.backward()
    for leaf in (x, y):
        assert leaf.grad is not None and leaf.grad.device.type == "meta" and leaf.grad.shape == leaf.shape


def test_grad_cache() -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(D, 16), torch.nn.Dropout(0.1)).to("meta")
    log_scale = number(2)
    cache = ct.GradCache(encoder, ct.ClipLoss(**HOW), chunk_size=16)
    loss = cache.step(features().detach(), features().detach(), logit_scale=log_scale.exp())
    assert loss.device.type == "meta"
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in (log_scale, *encoder.parameters()))
