"""Instructions per score: the figures of the kernels, and that counting them is right."""

# mypy: disable-error-code="no-untyped-def"
# (kernels)

import re
from collections import Counter
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import contratile as ct
from contratile.engine.backends import registry
from contratile.engine.backends.triton_launch import Device, Launch
from tests.engine.kernels import first_generation, resources
from tests.engine.kernels.ahead_of_time import name_of
from tests.engine.kernels.instructions import CALLS, CLASSES, blocks_per_sm, counted
from tests.engine.kernels.ptx_emulator import emulated
from tests.engine.kernels.samples import name_of_launch
from tests.helpers import features

D = 512
LIMITS: dict[tuple[int, str], dict[str, float]] = {
    (80, "forward_tiles"): {"all": 13, "exp2": 1.05, "shuffles": 1.4},
    (90, "forward_tiles"): {"all": 15, "exp2": 1.05, "shuffles": 2.2},
    (80, "gradient_tiles"): {"all": 11, "exp2": 1.02, "registers": 128},
    (90, "gradient_tiles"): {"all": 11, "exp2": 1.02, "registers": 128},
}
"""Of interior tiles of the plain call, per score; registers at 8 warps."""

# --- the kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [80, 90], ids=name_of)
def test_instructions_per_score(target: int) -> None:
    for launch in CALLS["plain"](target, D):
        if "BLOCK_D" in launch.arguments:
            found = counted(launch, target)
            assert found.multiplied == 1 and not found.notes, found
            limits = LIMITS[target, found.kernel]
            got = {"all": found.total, "registers": found.registers * found.warps / 8, **found.by_class}
            assert all(got[name] <= limit for name, limit in limits.items()), found


def test_the_first_generation_is_recorded_as_it_was_described() -> None:
    """The table from which the second generation set out: all code of a kernel, positives included."""
    assert first_generation.CLASSES == tuple(CLASSES)
    described = {
        (80, "forward_tiles"): {"exp2": 2.1, "shuffles": 2.5, "adds": 6.4, "min, max": 3.0, "selects": 3.0},
        (90, "forward_tiles"): {"exp2": 2.0, "shuffles": 6.2, "adds": 7.6, "min, max": 5.1},
        (80, "gradient_tiles"): {"exp2": 2.0, "shuffles": 0.3, "adds": 4.7, "selects": 3.9},
        (90, "gradient_tiles"): {"exp2": 2.0, "shuffles": 0.3, "adds": 4.7, "selects": 3.9},
    }
    for (target, kernel), classes in described.items():
        then = first_generation.TABLE[target, "plain", kernel]
        found = dict(zip(CLASSES, then.special, strict=True))
        assert {name: found[name] for name in classes} == pytest.approx(classes, abs=0.11)
        everything = {80: 25, 90: 31}[target] if kernel == "forward_tiles" else 24
        assert sum(then.special) - 1 < everything < sum(then.special) + then.once + 1.1


@pytest.mark.parametrize("target", [80, 90], ids=name_of)
def test_recorded_counts_are_of_these_kernels(target: int) -> None:
    """`make kernels` writes them."""
    recorded = resources.OUT.read_text().splitlines()
    rows = list(resources.counted_rows(target, notify=lambda what: None))
    assert rows and all(row in recorded for row in rows)


# --- against the emulator -----------------------------------------------------------------------------------------

PTX = {
    "exp2": r"ex2\.",
    "shuffles": r"(shfl|redux)\.",
    "adds": r"(add|sub)\.(\w+\.)*f32$",
    "fma, mul": r"(fma|mul)\.(\w+\.)*f32$",
    "min, max": r"(min|max)\.(\w+\.)*f32$",
}
"""What a class of instructions is compiled from. (The assembler joins and splits others.)"""

TOLERANCE = 0.035
"""Of instructions per score, in each of these classes: two instructions of a thread with 64 scores."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ids", [False, True], ids=["plain", "ids"])
def test_counts_are_those_of_a_run(ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator runs 3 x 3 and 4 x 4 tiles, of which 3 and 4 hold positives and are left to the careful launches.

    A fast program (of the gradient: a column of them) has one interior tile more of 4 x 4 than of 3 x 3. A careful one
    has as many as before, in low tiles, and passes over one more, which is nothing of these classes.
    """
    monkeypatch.setattr(registry, "unavailable", lambda device: None)
    monkeypatch.setattr(Device, "of", lambda device: Device(80, 0))  # no need to split rows
    small, large = (run_clip_loss(128 * side, ids) for side in (3, 4))
    for kernel in ("forward_tiles", "gradient_tiles"):
        (launch, few), (_, many) = small[kernel], large[kernel]
        interior = counted(launch, 80)
        assert interior.tile == (128, 128)
        scores = 128 * 128 / (32 * interior.warps)
        careful, low = small[f"{kernel}, careful"]
        special = counted(careful, 80, "special")
        for name, form in PTX.items():
            ran = [taken(tally, form) / (scores * side) for side, tally in ((3, few), (4, many))]
            assert ran[1] - ran[0] == pytest.approx(interior.by_class[name], abs=TOLERANCE), (kernel, name)
            at_positives = taken(low, form) / (3 * scores) - special.once[name] * special.tile[0] / 128
            assert at_positives == pytest.approx(special.by_class[name], abs=TOLERANCE), (kernel, name)


def taken(tally: Counter[str], form: str) -> int:
    return sum(times for step, times in tally.items() if re.match(form, step))


def run_clip_loss(n: int, ids: bool) -> dict[str, tuple[Launch, Counter[str]]]:
    """Each launch, and all the steps that it took."""
    tallies: dict[str, Counter[str]] = {}
    with emulated(tallies) as launches:
        q, k = (features(n, 32, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in (1, 2))
        scale = torch.tensor(8.0, requires_grad=True)
        ct.clip_loss(q, k, scale, ids=torch.arange(n) if ids else None, backend="triton").backward()
    tiles = [launch for launch in launches if "BLOCK_D" in launch.arguments]
    assert len(tiles) == len({name_of_launch(launch) for launch in tiles}) == 5
    return {name_of_launch(launch): (launch, tallies[name_of_launch(launch)]) for launch in tiles}


# --- small kernels ------------------------------------------------------------------------------------------------


@triton.jit
def sums_of_tiles(
    q, k, out, span, D, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Like the forward kernel: two attempts at a row of tiles, and in a tile a cheap and an exact way."""
    row, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    bad = 1
    total = tl.zeros([BLOCK_M], tl.float32)
    for attempt in range(2):
        if bad > 0:
            total = tl.zeros([BLOCK_M], tl.float32)
            for start in range(0, span, BLOCK_N):
                col = start + tl.arange(0, BLOCK_N)
                dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for at in range(0, D, BLOCK_D):
                    x = tl.load(q + row[:, None] * D + at + d[None, :])
                    y = tl.load(k + col[:, None] * D + at + d[None, :])
                    dots = tl.dot(x, tl.trans(y), dots)
                if (attempt == 1) | (start == tl.program_id(0) * BLOCK_M):
                    total += tl.sum(tl.exp2(dots - tl.max(dots, 1)[:, None]), 1)
                    total += tl.sum(tl.exp2(dots - tl.max(dots, 0)[None, :]), 1)
                else:
                    e = tl.exp2(dots)
                    if EXTRA:
                        e = tl.exp2(e)
                    total += tl.sum(e, 1)
            bad = (tl.max(total, 0) > 1e30).to(tl.int32)
    tl.store(out + row, total)


def tiles(extra: bool = False, **more: Any) -> Launch:
    n, meta = 1024, torch.device("meta")
    x = torch.empty(n, D, dtype=torch.bfloat16, device=meta)
    arguments: dict[str, Any] = {"q": x, "k": x, "out": torch.empty(n, device=meta), "span": n, "D": D}
    arguments |= {"EXTRA": extra, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 64, **more}
    return Launch(sums_of_tiles, (n // 64,), arguments, {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True})


@pytest.mark.parametrize("target", [80, 90, 120], ids=name_of)
def test_an_exponential_more_is_counted(target: int) -> None:
    plain, more = counted(tiles(), target), counted(tiles(extra=True), target)
    assert plain.by_class["exp2"] == 1 and more.by_class["exp2"] == 2
    assert 2.5 < plain.total < more.total - 0.9 and not plain.notes
    assert plain.multiplied == 1 == more.multiplied


@pytest.mark.parametrize("target", [80, 90], ids=name_of)
def test_the_exact_way_is_counted_apart(target: int) -> None:
    interior, special = counted(tiles(), target), counted(tiles(), target, "special")
    assert special.by_class["exp2"] == pytest.approx(2, abs=0.05)
    assert special.by_class["min, max"] > 1 > interior.by_class["min, max"]
    assert special.product == pytest.approx(interior.product, abs=0.5) and special.multiplied == 1
    assert 0 < interior.once["min, max"] < 1  # the end of an attempt


def test_more_features_are_more_product_and_nothing_else() -> None:
    few, many = counted(tiles(), 80), counted(tiles(D=1024), 80)
    assert many.by_class == few.by_class
    assert many.product > 1.5 * few.product and many.multiplied == 1


def test_blocks_of_a_multiprocessor() -> None:
    assert blocks_per_sm(80, 8, registers=128, shared=65_536, tmem=0) == 2
    assert blocks_per_sm(80, 8, registers=129, shared=65_536, tmem=0) == 1
    assert blocks_per_sm(80, 8, registers=64, shared=65_536, tmem=0) == 2  # 164K of shared memory
    assert blocks_per_sm(90, 4, registers=168, shared=73_728, tmem=0) == 3
    assert blocks_per_sm(100, 4, registers=64, shared=1024, tmem=256) == 2
