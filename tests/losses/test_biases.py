"""Biases of keys that are -inf: such a key is left out, as one that was never passed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile import reference
from tests.helpers import features

N, D, E, H = 19, 8, 5, 2
NOBODY, SOME = torch.full((E,), -torch.inf), torch.tensor([-torch.inf, 0, 1, -torch.inf, -2])
LABELS = torch.arange(N) % 3

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "margin": {"margin": 0.1},
    "hardness": {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
    "matryoshka": {"matryoshka_dims": (3, D)},
    "elsewhere": {"in_batch_negatives": False},
}


def gradients(module: Any, leaves: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    """The value and the gradients of `info_nce`."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    value = module.info_nce(**leaves, **how)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return {"value": value.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("tile", [None, 4])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("which", ["all extra keys", "some extra keys", "all hard negatives", "keys of nobody"])
def test_keys_are_left_out(which: str, option: str, tile: int | None) -> None:
    """A query whose every negative of a kind is left out has a finite gradient."""
    query, key, extra, hard = (features(n, D, seed=seed) for seed, n in enumerate((N, N, E, N * H)))
    leaves = {"query": query, "key": key, "scale": torch.tensor(20.0), "extra_keys": extra}
    leaves["hard_negatives"] = hard.view(N, H, D)
    more: dict[str, Any] = dict(OPTIONS[option])
    if which == "all hard negatives":
        leaves["hard_bias"] = torch.full((N, H), -torch.inf)
    elif which == "keys of nobody":
        leaves["key_bias"] = torch.where(torch.arange(N) < 3, 0.5, -torch.inf)
        more["labels"] = LABELS
    else:
        leaves["extra_bias"] = NOBODY if which == "all extra keys" else SOME
    want = gradients(reference, leaves, **more)
    got = gradients(ct, leaves, **more, tile=tile, group=None)
    assert all(x.isfinite().all() for x in want.values())
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-12, msg=name)


def test_the_loss_is_that_without_them() -> None:
    query, key, extra = (features(n, D, seed=seed) for seed, n in enumerate((N, N, E)))
    kept = SOME > -torch.inf
    got = ct.info_nce(query, key, 20.0, extra_keys=extra, extra_bias=SOME, group=None)
    want = ct.info_nce(query, key, 20.0, extra_keys=extra[kept], extra_bias=SOME[kept], group=None)
    torch.testing.assert_close(got, want)
