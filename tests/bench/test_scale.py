"""The benchmark of one rank of many, by a tiny run of it; its formulas and its stand-ins for the paper's kernels."""

from pathlib import Path

import pytest
import torch

from contratile.bench.contestants.loss import LossProblem
from contratile.bench.contestants.scale import MEMORY, _tiled_gradients, _tiled_lse, simulated
from contratile.bench.plots import draw
from contratile.bench.rows import load, save
from contratile.bench.runner import run
from contratile.bench.scale import BENCH, HOPS, ScaleBenchConfig
from contratile.cli.tables import notes, tables
from contratile.ring.mail import Buffers


def test_a_tiny_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config = ScaleBenchConfig(
        worlds=(2, 16),
        batches=(64, 16384),
        check_world=0,
        dims=(64,),
        budget=0.001,
        threads=1,
        contestants=("contratile", "contratile_nodes", "open_clip", "open_clip_local"),
    )
    recording = run(BENCH, config, command="test")
    assert len(recording.rows) == 2 * 3 + 2 * 4, "one node is no ring over nodes"
    for row in recording.rows:
        assert row.status == "ok" and row.formula_mib > 0
        assert (row.how == "formula") == (row.contestant.startswith("open_clip"))
        assert (row.peak_extra_mib is None) == (row.how == "formula")
    part = next(row for row in recording.rows if row.queries and row.queries < row.local and row.world == 2)
    assert part.hops == 3 and part.local == 8192
    save(recording, tmp_path)
    assert load(tmp_path / "scale.json") == recording
    assert [path.name for path in draw(recording, tmp_path)] == ["scale.png"]
    assert len(tables(recording)) == 2 and notes(recording) == []


@pytest.mark.parametrize("name", ["contratile", "contratile_nodes"])
def test_few_hops_need_all_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring that is simulated allocates as many blocks as a longer one."""
    made: dict[int, int] = {}
    reuse = Buffers.reuse

    def counting(self: Buffers, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        found = reuse(self, shape, dtype)
        made[ranks] += found is None and len(shape) == 2
        return found

    monkeypatch.setattr(Buffers, "reuse", counting)
    short, long = HOPS[name], (16, 1 if name == "contratile" else 4)
    for ranks, nodes in (short, long):
        made[ranks] = 0
        step, _ = simulated(name, ranks, nodes)
        LossProblem.make(16, 8, scale=5.0).bind(step)()
    assert made[short[0]] == made[long[0]] > 0


def test_tiles_in_place_of_the_papers_kernels() -> None:
    q, k = (torch.randn(600, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(600, dtype=torch.float64)
    want = (q.flatten(1) @ k.flatten(1).T).logsumexp(1)
    (want * weight).sum().backward()
    lse = _tiled_lse(q.detach(), k.detach())
    torch.testing.assert_close(lse, want.detach())
    for got, x in zip(_tiled_gradients(q.detach(), k.detach(), lse, weight), (q, k), strict=True):
        torch.testing.assert_close(got, x.grad)


def test_formulas_of_the_papers_sizes() -> None:
    """Inf-CL at 256k on 8 GPUs: the paper reports 1.45 GB."""
    n, total = 32768, 262144
    assert MEMORY["inf_cl"](n, total, 768) == pytest.approx(1.45e9, rel=0.15)
    assert MEMORY["contratile"](n, total, 768) <= 0.48e9
    assert MEMORY["contratile_nodes"](8192, 1 << 20, 768) <= 0.27e9


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"batches: expected multiples of 8, got 2049"):
        ScaleBenchConfig(batches=(2049,))
    with pytest.raises(ValueError, match=r"budget: expected a positive number of TFLOP, got 0"):
        ScaleBenchConfig(budget=0)
    with pytest.raises(ValueError, match=r"contestants: expected"):
        ScaleBenchConfig(contestants=("nobody",))
