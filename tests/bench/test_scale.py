"""The benchmark of one rank of many, by a tiny run of it; its formulas and its stand-ins for the paper's kernels."""

from pathlib import Path

import pytest
import torch

from contratile.bench.contestants.loss import LossProblem
from contratile.bench.contestants.scale import MEMORY, _tiled_gradients, _tiled_lse, simulated
from contratile.bench.plots import draw
from contratile.bench.rows import Recording, ScaleRow, load_rows, save_rows
from contratile.bench.runner import run
from contratile.bench.scale import BENCH, HOPS, ScaleBenchConfig, ScaleSeries
from contratile.cli.tables import notes, tables
from contratile.ring.mail import Buffers


@pytest.fixture(scope="module")
def recording() -> Recording[ScaleRow]:
    """A simulated rank of 2, too large for its budget, and two real ranks."""
    config = ScaleBenchConfig(
        worlds=(2,),
        batches=(16384,),
        check_worlds=(2,),
        check_batches=(2048,),
        dims=(64,),
        budget=0.001,
        threads=1,
        contestants=("contratile", "contratile_nodes"),
    )
    return run(BENCH, config, command="test")


def test_a_simulated_rank(recording: Recording[ScaleRow]) -> None:
    row, *others = [row for row in recording.rows if "real ranks" not in row.how]
    assert not others, "one node is no ring over nodes"
    assert (row.status, row.how, row.hops, row.local) == ("ok", "simulated rank", 3, 8192)
    assert row.queries is not None and row.queries < row.local
    assert row.peak_extra_mib is not None and 0.3 * row.formula_mib < row.peak_extra_mib < 1.2 * row.formula_mib


def test_real_ranks_hold_what_a_simulated_one_does(recording: Recording[ScaleRow]) -> None:
    real, simulated = [row for row in recording.rows if "real ranks" in row.how]
    assert (real.how, simulated.how) == ("real ranks", "simulated beside real ranks")
    for row in (real, simulated):
        assert (row.status, row.n, row.world, row.hops, row.queries) == ("ok", 2048, 2, 2, 1024)
    assert real.peak_extra_mib == pytest.approx(simulated.peak_extra_mib, rel=0.25)


def test_formulas_need_no_process() -> None:
    config = ScaleBenchConfig(worlds=(16,), batches=(64,), contestants=("open_clip", "open_clip_local"))
    rows = list(ScaleSeries(config, 16, 64).rows(64))
    assert [row["contestant"] for row in rows] == ["open_clip", "open_clip_local"]
    for row in rows:
        assert row["status"] == "ok" and row["how"] == "formula" and row["formula_mib"] > 0
        assert row["peak_extra_mib"] is None


def test_over_nodes_only_where_there_are_several() -> None:
    config = ScaleBenchConfig(node=8)
    assert [ScaleSeries(config, world, 64)._several_nodes() for world in (8, 12, 16, 128)] == [False, False, True, True]


def test_rows_are_recorded_and_drawn(recording: Recording[ScaleRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_rows(recording, tmp_path)
    assert load_rows(tmp_path / "scale.json") == recording
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
    with pytest.raises(ValueError, match=r"batches: expected multiples of 8 \(worlds\), got 2049"):
        ScaleBenchConfig(batches=(2049,))
    with pytest.raises(ValueError, match=r"check_batches: expected multiples of 4 \(check_worlds\), got 2050"):
        ScaleBenchConfig(check_batches=(2050,))
    with pytest.raises(TypeError, match="rounds"):
        ScaleBenchConfig(rounds=2)  # type: ignore[call-arg]  # nothing is timed
    with pytest.raises(ValueError, match=r"budget: expected a positive number of TFLOP, got 0"):
        ScaleBenchConfig(budget=0)
    with pytest.raises(ValueError, match=r"contestants: expected"):
        ScaleBenchConfig(contestants=("nobody",))
