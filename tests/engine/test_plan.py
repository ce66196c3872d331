"""The tile plan: every pair in exactly one tile, bounded scratch memory, a cache of whole tiles."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import contratile.engine.plan
from contratile.engine.plan import WORKSPACE_LIMIT, Machine, MiB, TilePlan, plan_tiles, this_machine

sizes = st.integers(1, 60)
tiles = st.one_of(st.none(), st.integers(1, 70))
machines = st.builds(
    Machine, cores=st.integers(1, 256), shared_cache=st.sampled_from([0, 1 << 16, MiB, 1 << 24, 1 << 29])
)


@st.composite
def plans(draw: st.DrawFn) -> TilePlan:
    n, symmetric = draw(sizes), draw(st.booleans())
    m = n if symmetric else draw(sizes)
    itemsize = draw(st.sampled_from([4, 8]))
    machine = Machine(cores=1, shared_cache=draw(st.sampled_from([0, 1 << 16])))
    return plan_tiles(n, m, draw(sizes), tile=draw(tiles), itemsize=itemsize, symmetric=symmetric, machine=machine)


@settings(deadline=None)
@given(plans())
def test_every_pair_lies_in_exactly_one_tile(plan: TilePlan) -> None:
    seen = [[0] * plan.m for _ in range(plan.n)]
    for tile in plan.tiles():
        assert tile.shape[0] <= plan.rows and tile.shape[1] <= plan.cols
        for i in range(tile.rows.start, tile.rows.stop):
            for j in range(tile.cols.start, tile.cols.stop):
                seen[i][j] += 1
                if tile.mirrored:
                    seen[j][i] += 1
    assert all(count == 1 for row in seen for count in row)


@settings(deadline=None)
@given(plans())
def test_tiles_are_stored_one_after_the_other(plan: TilePlan) -> None:
    end = 0
    for tile in plan.tiles():
        assert tile.offset == end
        end = tile.end
    if not plan.symmetric:
        assert end == plan.n * plan.m


@settings(deadline=None)
@given(plans(), st.integers(0, 20_000))
def test_cache_is_a_prefix_of_whole_tiles(plan: TilePlan, cache_bytes: int) -> None:
    items = plan.cached_items(cache_bytes)
    assert items * plan.itemsize <= cache_bytes
    ends = [0, *(tile.end for tile in plan.tiles())]
    assert items in ends
    following = ends.index(items) + 1
    assert following == len(ends) or ends[following] * plan.itemsize > cache_bytes  # no further tile would fit


@pytest.mark.parametrize("itemsize", [4, 8])
def test_a_cache_of_every_score_keeps_every_tile(itemsize: int) -> None:
    plan = plan_tiles(100, 70, 8, tile=16, itemsize=itemsize)
    assert plan.cached_items(100 * 70 * itemsize) == 100 * 70
    assert plan.cached_items(100 * 70 * itemsize - 1) < 100 * 70
    assert plan.cached_items(0) == 0


@settings(deadline=None)
@given(
    n=st.integers(1, 10**7),
    m=st.integers(1, 10**7),
    d=st.integers(1, 50_000),
    itemsize=st.sampled_from([4, 8]),
    machine=machines,
)
def test_automatic_plans_bound_the_workspace(n: int, m: int, d: int, itemsize: int, machine: Machine) -> None:
    plan = plan_tiles(n, m, d, itemsize=itemsize, machine=machine)
    smallest = (3 * 16 * 16 + 3 * 16 * d) * itemsize  # tiles shrink no further than to an edge of 16
    assert plan.workspace_bytes <= max(WORKSPACE_LIMIT, smallest)
    assert 1 <= plan.rows <= n and 1 <= plan.cols <= m


@settings(deadline=None)
@given(n=st.integers(1, 10**6), d=st.integers(1, 4096), machine=machines)
def test_automatic_plans_are_even(n: int, d: int, machine: Machine) -> None:
    """Row blocks differ by less than 16 rows per block, and blocks are aligned unless they are all of the rows."""
    plan = plan_tiles(n, n, d, machine=machine)
    assert plan.rows == n or plan.rows % 16 == 0
    assert plan.cols == n or plan.cols % 16 == 0


@pytest.mark.parametrize(("n", "m"), [(3000, 5000), (64, 7)])
@pytest.mark.parametrize("tile", [1, 33, 64, 4096])
def test_tile_forces_the_sizes(n: int, m: int, tile: int) -> None:
    plan = plan_tiles(n, m, 10, tile=tile)
    assert (plan.rows, plan.cols) == (min(n, tile), min(m, tile))


def test_larger_caches_and_more_cores_give_larger_tiles() -> None:
    def edge(cores: int, cache: int) -> int:
        return plan_tiles(10**6, 10**6, 512, machine=Machine(cores=cores, shared_cache=cache)).rows

    assert edge(2, 4 * MiB) < edge(2, 64 * MiB)
    assert edge(1, 4 * MiB) < edge(8, 4 * MiB)


def test_plans_are_frozen_hashable_values() -> None:
    plan = plan_tiles(100, 200, 8, tile=32)
    assert plan == plan_tiles(100, 200, 8, tile=32) and hash(plan) == hash(plan_tiles(100, 200, 8, tile=32))
    assert plan != plan_tiles(100, 200, 8, tile=31)
    with pytest.raises(FrozenInstanceError):
        plan.rows = 1  # type: ignore[misc]


def test_symmetric_plans_are_square() -> None:
    with pytest.raises(AssertionError, match="square"):
        TilePlan(n=4, m=5, d=1, rows=2, cols=2, symmetric=True)


def test_print() -> None:
    text = str(plan_tiles(100, 70, 8, tile=32))
    assert text.startswith("100 x 70 x 8 in ") and "tiles of 32 x 32" in text and text.endswith("workspace 0.0 MiB")
    assert "16.0 MiB" in str(TilePlan(n=9, m=9, d=0, rows=1, cols=4 * MiB // 3, itemsize=4))


def test_docstring_shows_what_is_printed() -> None:
    """The example of the module docstring is for a machine whose tiles are 1024 x 1024."""
    doc = contratile.engine.plan.__doc__ or ""
    shown = doc.split(">>> print(plan_tiles(8192, 8192, 512))\n")[1].split("\n")[0].strip()
    assert shown == str(plan_tiles(8192, 8192, 512, machine=Machine(cores=8, shared_cache=32 * MiB)))


def test_this_machine() -> None:
    machine = this_machine()
    assert machine.cores >= 1 and machine.shared_cache >= 1 << 16


def test_module_needs_no_torch() -> None:
    """Loaded alone from its file, the module imports no torch: plans are pure integers."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tiles', {str(Path(contratile.engine.plan.__file__))!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['tiles'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(module.plan_tiles(4, 4, 4, tile=2))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
