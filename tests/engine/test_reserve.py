"""Memory that is kept from one step to the next, and losses that keep their scores in it."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.engine import reserve
from contratile.engine.reserve import SMALLEST, Reserve
from tests.helpers import assert_same, features, run

LIKE = torch.empty(0)
ITEMS = SMALLEST // LIKE.itemsize
N = 600  # N x N scores are more than the smallest block


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Reserve:
    """A reserve of its own for the losses of a test."""
    mine = Reserve()
    monkeypatch.setattr(reserve, "take", mine.take)
    return mine


def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return ct.clip_loss(image, text, scale, cache_bytes=4 * N * N)


def test_keys_and_extra_keys_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take(items: int, like: Tensor) -> Tensor:
        taken.append(items * like.itemsize)
        return like.new_empty(items)

    monkeypatch.setattr(reserve, "take", take)
    q, k, extra = (features(n, 8, seed=n).requires_grad_() for n in (60, 60, 180))
    for room, whole in ((60 * 240 * 4, True), (60 * 120 * 4, False)):
        taken.clear()
        ours = run(lambda *x: ct.clip_loss(x[0], x[1], extra_keys=x[2], tile=10, cache_bytes=room), q, k, extra)  # noqa: B023
        assert len(taken) == 2 and all(taken) and (sum(taken) == room if whole else sum(taken) <= room)
        assert_same(ours, run(lambda *x: ct.clip_loss(x[0], x[1], extra_keys=x[2], tile=10), q, k, extra))


def test_memory_comes_back_when_nobody_holds_it() -> None:
    lender = Reserve()
    first = lender.take(2 * ITEMS, LIKE)
    at = first.data_ptr()
    view = first[5:]
    del first
    second = lender.take(ITEMS, LIKE)
    assert second.data_ptr() != at, "a view still held it"
    del view
    third = lender.take(ITEMS, LIKE)
    assert third.data_ptr() == at and third.shape == (ITEMS,) and third.dtype == LIKE.dtype
    assert lender.take(ITEMS, LIKE).data_ptr() not in (at, second.data_ptr())


def test_the_smallest_block_that_fits_is_taken() -> None:
    lender = Reserve()
    held = [lender.take(items, LIKE) for items in (4 * ITEMS, 2 * ITEMS, 3 * ITEMS)]
    at = held[1].data_ptr()
    held.clear()
    assert lender.take(2 * ITEMS, LIKE).data_ptr() == at


def test_blocks_that_are_too_small_are_given_back() -> None:
    lender = Reserve()
    held, idle = lender.take(ITEMS, LIKE), lender.take(ITEMS, LIKE)
    del idle
    larger = lender.take(2 * ITEMS, LIKE)
    assert sorted(len(block) for block in lender._blocks) == [SMALLEST, 2 * SMALLEST]
    assert held.data_ptr() != larger.data_ptr()


def test_small_tensors_and_other_devices_are_left_to_torch() -> None:
    lender = Reserve()
    assert lender.take(ITEMS - 1, LIKE).shape == (ITEMS - 1,)
    there = lender.take(ITEMS, torch.empty(0, dtype=torch.float64, device="meta"))
    assert there.is_meta and there.dtype == torch.float64
    assert not lender._blocks


def test_steps_share_one_block(kept: Reserve) -> None:
    inputs = features(N, 8, seed=1), features(N, 8, seed=2), torch.tensor(5.0)
    without = run(ct.clip_loss, *inputs)
    for _ in range(3):
        assert_same(run(loss, *inputs), without)
        assert len(kept._blocks) == 1
        kept.take(N * N, LIKE).fill_(torch.nan)  # what a step finds there must not matter


def test_backward_gives_back_what_a_living_loss_kept(kept: Reserve) -> None:
    image, text = (features(N, 8, seed=seed).requires_grad_() for seed in (1, 2))
    losses = []
    for _ in range(3):
        losses.append(loss(image, text, torch.tensor(5.0)))
        losses[-1].backward()
    assert len(kept._blocks) == 1


def test_a_graph_keeps_its_scores_through_other_steps(kept: Reserve) -> None:
    inputs = features(N, 8, seed=1), features(N, 8, seed=2), torch.tensor(5.0)
    without = run(ct.clip_loss, *inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    waiting = loss(*leaves)
    run(loss, features(N, 8, seed=3), features(N, 8, seed=4), torch.tensor(7.0))
    assert len(kept._blocks) == 2
    for _ in range(2):
        grads = torch.autograd.grad(waiting, leaves, retain_graph=True)
        assert all(map(torch.equal, grads, without.grads))


def test_threads_do_not_share_memory(kept: Reserve) -> None:
    pairs = [(features(N, 8, seed=i), features(N, 8, seed=i + 9), torch.tensor(5.0)) for i in range(4)]
    without = [run(ct.clip_loss, *pair) for pair in pairs]
    with ThreadPoolExecutor(len(pairs)) as pool:
        for _ in range(3):
            for got, expected in zip(pool.map(lambda pair: run(loss, *pair), pairs), without, strict=True):
                torch.testing.assert_close(got.values + got.grads, expected.values + expected.grads)
    assert len(kept._blocks) <= len(pairs)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_has_its_own() -> None:
    code = """
import os, torch
from contratile.engine import reserve
mine = reserve.take(1 << 20, torch.empty(0)).fill_(1)
child = os.fork()
if child == 0:
    mine.fill_(2)
    os._exit(0)
os.waitpid(child, 0)
assert mine.eq(1).all()
"""
    subprocess.run([sys.executable, "-c", "import torch; torch.set_num_threads(1)" + code], check=True)
