"""The default configurations as compiled for sm_80, run by the emulator through the public functions, against fp64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile import reference
from contratile.engine.backends import registry
from contratile.engine.backends.triton_launch import Launch
from tests.engine.kernels.ptx_emulator import emulated
from tests.engine.kernels.samples import name_of_launch
from tests.helpers import Function, assert_error, features, labels_of
from tests.helpers import run as outcome

N, M, D = 131, 150, 80
"""More than a tile of 128 x 128 x 64. Rows are multiples of 16 bytes, as those that are copied asynchronously."""

SCALE = 8.0


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Host code takes CPU tensors for those of an sm_80, and its launches are emulated."""
    monkeypatch.setattr(registry, "unavailable", lambda device: None)
    with emulated() as done:
        yield done


LABELS = labels_of(N, M, seed=3)
IDS = torch.arange(N) % 17
CASES: dict[str, tuple[int, Function]] = {
    "clip_loss": (N, lambda of, q, k, s, **how: of.clip_loss(q, k, s, **how)),
    "ids": (N, lambda of, q, k, s, **how: of.clip_loss(q, k, s, ids=IDS, **how)),
    "info_nce": (M, lambda of, q, k, s, **how: of.info_nce(q, k, s, labels=LABELS, **how)),
    "nt_xent": (N, lambda of, q, k, s, **how: of.nt_xent(q, k, 1 / s, **how)),
    "siglip_loss": (N, lambda of, q, k, s, **how: of.siglip_loss(q, k, s, -3.0, **how)),
}


SLOW = [
    ("ids", torch.bfloat16, None),
    ("info_nce", torch.bfloat16, None),
    ("siglip_loss", torch.bfloat16, None),
    ("clip_loss", torch.float16, None),
    ("clip_loss", torch.float32, "tf32x3"),
    ("clip_loss", torch.float32, "ieee"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    [
        ("clip_loss", torch.bfloat16, None),
        ("clip_loss", torch.float32, "tf32"),
        ("nt_xent", torch.bfloat16, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_compiled_code(name: str, dtype: torch.dtype, precision: str | None, launches: list[Launch]) -> None:
    """Values and gradients are off by no more than the dense formula in the same arithmetic, and a rounding."""
    keys, loss = CASES[name]
    inputs = [features(N, D, seed=1, dtype=dtype), features(keys, D, seed=2, dtype=dtype), torch.tensor(SCALE)]
    how = {"backend": "triton", "precision": precision}
    got = outcome(lambda *x: loss(ct, *x, **how), *inputs)
    assert {"positive_products", "forward_tiles", "merge_parts", "gradient_tiles"} <= {
        launch.kernel.__name__ for launch in launches
    }
    exact = outcome(lambda *x: loss(reference, *x), *inputs, dtype=torch.float64)
    rounded = [nearest_tf32(x) for x in inputs] if precision == "tf32" else inputs
    naive = outcome(lambda *x: loss(reference, *x), *rounded, dtype=dtype)
    eps = 2**-11 if precision == "tf32" else torch.finfo(dtype).eps
    pairs = zip(got.values + got.grads, naive.values + naive.grads, exact.values + exact.grads, strict=True)
    for ours, dense, true in pairs:
        assert_error(ours, dense, true, floor=(1 + SCALE) * eps * float(true.abs().max()))


def nearest_tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def statistics(launches: list[Launch]) -> list[Launch]:
    return [launch for launch in launches if name_of_launch(launch) == "forward_tiles, careful, statistics"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scale", [SCALE, pytest.param(-SCALE, marks=pytest.mark.slow)])
def test_statistics_of_compiled_code(scale: float, launches: list[Launch]) -> None:
    """What training asks for: ranks exactly, mean scores but for rounding. 300 rows have interior tiles."""
    n = 300
    options: dict[str, Any] = {"ids": torch.arange(n) // 2, "return_stats": True}
    q, k = (features(n, D, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in (1, 2))
    loss, found = ct.clip_loss(q, k, scale, backend="triton", **options)
    loss.backward()
    assert statistics(launches) and not any(marks_of(launches))
    x, y = (z.detach().double().requires_grad_() for z in (q, k))
    true, expected = ct.clip_loss(x, y, scale, backend="torch", **options)
    true.backward()
    torch.testing.assert_close(loss, true, rtol=1e-5, atol=1e-5, check_dtype=False)
    for name, a, b in zip(found._fields, found, expected, strict=True):
        exact = 1e-6 if not name.endswith("logit") else 1e-5
        torch.testing.assert_close(a, b, rtol=exact, atol=exact, check_dtype=False)
    for a, b in ((q.grad, x.grad), (k.grad, y.grad)):
        assert a is not None and b is not None
        assert float((a.double() - b).abs().max()) <= 2**-6 * float(b.abs().max())


@pytest.mark.timeout(900)
def test_marked_programs_of_compiled_code(launches: list[Launch]) -> None:
    """A row and a column far from all others: their programs are marked, the others are not."""
    n = 300
    q, k = (features(n, D, seed=seed, dtype=torch.bfloat16).abs() for seed in (1, 2))
    k[3] *= -16
    q, k = q.requires_grad_(), k.requires_grad_()
    row, col = ct.pair_lse(q, k, SCALE, backend="triton")
    assert set(marks_of(launches)) == {0, 1}
    (row.sum() + col.sum()).backward()
    x, y = (z.detach().double().requires_grad_() for z in (q, k))
    scores = SCALE * x @ y.T
    (scores.logsumexp(1).sum() + scores.logsumexp(0).sum()).backward()
    torch.testing.assert_close(row, scores.logsumexp(1).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(col, scores.logsumexp(0).float(), rtol=1e-5, atol=1e-4)
    for a, b in ((q.grad, x.grad), (k.grad, y.grad)):
        assert a is not None and b is not None
        assert float((a.double() - b).abs().max()) <= 2**-6 * float(b.abs().max())


def marks_of(launches: list[Launch]) -> list[int]:
    """Of the last fast launch."""
    last = [launch for launch in launches if name_of_launch(launch) == "forward_tiles"][-1]
    return [int(x) for x in last.arguments["marks"][: last.grid[0] * last.grid[1]]]
