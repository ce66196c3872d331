"""What a run says about itself."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import csv
import io
import json
import math
import mmap
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contratile.planner.loss_memory import DENSE_MATRICES, dense_loss_bytes, tiled_loss_bytes
from contratile.report.metric_text import in_a_line
from contratile.report.tracking import METRICS, Tracker, binary_size, history, line, memory_now, rewind
from contratile.train.config import LossConfig, TrainConfig

ROOT = Path(__file__).parent.parent.parent
FACTS = {"loss": 8.25, "top1": 0.0125, "scale": 14.29, "lr": 1e-3, "pairs": 4096.0, "seconds": 2.0, "epoch": 0}


def tracked(out: Path, **options: Any) -> Tracker:
    """A tracker of a run of 4,096 pairs in a step, without TensorBoard."""
    memory = {"loss_memory": tiled_loss_bytes(4096, 512), "dense_memory": dense_loss_bytes(4096)}
    return Tracker(out, **{"tensorboard": False, **memory, **options})


def quiet() -> Console:
    return Console(file=io.StringIO())


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- metrics.jsonl ------------------------------------------------------------------------------------------------


def test_every_line_is_an_object(tmp_path: Path) -> None:
    with tracked(tmp_path, steps=2, console=quiet()) as tracker:
        tracker.step(1, FACTS)
        tracker.step(2, FACTS | {"loss": math.nan}, broken=Counter({"truncated image": 3}))
        tracker.evaluation(2, {"text_to_image_R@10": 0.25})
        # Written as it happens: a kill now would lose nothing.
        lines = (tmp_path / METRICS).read_text().splitlines()
    entries = [json.loads(text, parse_constant=pytest.fail) for text in lines]
    assert entries == history(tmp_path)
    first, second, evaluation = entries
    assert {name: first[name] for name in ("step", "loss", "top1", "scale", "lr", "epoch")} == {
        "step": 1,
        "loss": 8.25,
        "top1": 0.0125,
        "scale": 14.29,
        "lr": 1e-3,
        "epoch": 0,
    }
    assert first["samples_per_second"] == 2048 and "broken" not in first and "seconds" not in first
    assert first["dense_memory"] == 4 * 4096**2 * 4 and 1e7 < first["memory"] < 1e12
    assert second["loss"] is None and second["broken"] == 3
    assert evaluation == {"step": 2, "text_to_image_R@10": 0.25}


def test_lines_come_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    with tracked(tmp_path, log_every=3, steps=8, console=quiet()) as tracker:
        for step in range(1, 9):
            tracker.step(step, FACTS)
    assert [entry["step"] for entry in history(tmp_path)] == [3, 6, 8]


def test_a_resumed_run_forgets_later_steps(tmp_path: Path) -> None:
    with tracked(tmp_path, steps=5, console=quiet()) as tracker:
        for step in range(1, 5):
            tracker.step(step, FACTS | {"loss": float(step)})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "lo')  # killed here
    assert [entry["step"] for entry in history(tmp_path)] == [1, 2, 3, 4]
    with tracked(tmp_path, steps=5, step=2, console=quiet()) as tracker:
        for step in range(3, 6):
            tracker.step(step, FACTS | {"loss": 10.0 * step})
    losses = {entry["step"]: entry["loss"] for entry in history(tmp_path)}
    assert losses == {1: 1, 2: 2, 3: 30, 4: 40, 5: 50} and len(history(tmp_path)) == 5
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_run_that_begins_again_says_nothing_twice(tmp_path: Path) -> None:
    """It was killed before its first checkpoint, twice."""
    for _ in range(3):
        with tracked(tmp_path, steps=5, console=quiet()) as tracker:
            tracker.evaluation(0, {"text_to_image_R@10": 0.25})
            tracker.step(1, FACTS)
    assert [entry["step"] for entry in history(tmp_path)] == [0, 1]


def test_history_refuses_what_is_no_line(tmp_path: Path) -> None:
    assert history(tmp_path) == []
    (tmp_path / METRICS).write_text('{"step": 1}\n{"stop": 2}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: expected an object with a step, got .*stop"):
        history(tmp_path)
    rewind(tmp_path / METRICS, 9)
    assert [entry["step"] for entry in history(tmp_path)] == [1, 3]


def test_other_processes_are_silent(tmp_path: Path) -> None:
    console = quiet()
    with tracked(tmp_path / "run", steps=2, main=False, console=console) as tracker:
        tracker.step(1, FACTS)
        tracker.evaluation(1, {"R": 1.0})
    assert not (tmp_path / "run").exists() and not said(console)


# --- the terminal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [False, True])
def test_the_line_names_everything(terminal: bool, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with tracked(tmp_path, steps=10, console=console) as tracker:
        tracker.step(1, FACTS, broken=Counter(a=2))
        tracker.evaluation(1, {"text_to_image_R@10": 0.25})
    text = said(console)
    for part in ("loss 8.2500", "top-1 1.2%", "scale 14.3", "lr 1.00e-03", "2,048 samples/s", "2 broken samples"):
        assert part in text
    assert re.search(r"loss memory \d+\.?\d* MiB \(dense: 256 MiB\)", text)
    assert "step 1: text to image R@10 0.25" in text


def test_plain_output_is_short(tmp_path: Path) -> None:
    console = quiet()
    with tracked(tmp_path, steps=1000, step=100, console=console) as tracker:
        for step in range(101, 1001):
            tracker.step(step, FACTS)
    lines = said(console).splitlines()
    assert 40 <= len(lines) <= 51 and lines[-1].startswith("step 1000/1000: loss")


def test_sizes_in_words() -> None:
    numbers = (0, 1000, 1 << 20, 1023 << 20, 3 << 29, 5 << 40, 5000 << 40)
    assert [binary_size(n) for n in numbers] == [
        "0 B",
        "1,000 B",
        "1 MiB",
        "1,023 MiB",
        "1.5 GiB",
        "5 TiB",
        "5,000 TiB",
    ]


def test_a_line_leaves_out_what_a_loss_has_not() -> None:
    assert line({"loss": 1.0, "lr": 0.1}) == "loss 1.0000 · lr 1.00e-01"


# --- memory -------------------------------------------------------------------------------------------------------


def test_memory_now_sees_what_is_allocated() -> None:
    before = memory_now()
    with mmap.mmap(-1, 64 << 20) as block:  # fresh pages: what malloc gives may be memory that was freed but kept
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert 60 << 20 < memory_now() - before < 200 << 20


def test_the_dense_figure_is_what_was_measured() -> None:
    ratios = []
    for path in (ROOT / "benchmarks" / "results").glob("*/loss.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            if row["contestant"] == "dense" and row["peak_extra_mib"] and int(row["n"]) >= 4096:
                ratios.append(float(row["peak_extra_mib"]) / (int(row["n"]) ** 2 * 4 / (1 << 20)))
    assert ratios and ratios == pytest.approx([DENSE_MATRICES] * len(ratios), rel=0.1)


@pytest.mark.parametrize(("loss", "views"), [("clip", 1), ("siglip", 1), ("ntxent", 2), ("supcon", 2)])
def test_the_dense_figure_counts_views(loss: Any, views: int, tmp_path: Path) -> None:
    config = TrainConfig(loss=LossConfig(loss=loss)).loss
    with tracked(
        tmp_path, steps=1, dense_memory=dense_loss_bytes(4096, views=config.rows_per_pair), console=quiet()
    ) as tracker:
        tracker.step(1, FACTS)
    assert history(tmp_path)[0]["dense_memory"] == 16 * (views * 4096) ** 2


def test_the_figure_of_the_loss_is_linear_in_the_batch() -> None:
    """Beyond a workspace of at most 40 MiB; dense, which is quadratic, is far above it."""
    for n in (65_536, 262_144):
        assert 0 < tiled_loss_bytes(n, 512) - n * (512 + 3) * 4 <= 40 << 20
    assert tiled_loss_bytes(4096, 512) < 50 << 20 < dense_loss_bytes(4096)
    assert tiled_loss_bytes(4096, 512, cache_bytes=1 << 40) - tiled_loss_bytes(4096, 512) == 4 * 4096**2
    alone, shared = (tiled_loss_bytes(262_144, 512, processes=world) for world in (1, 8))
    assert shared < alone / 2, "a rank holds its share, and two visiting blocks"


# --- other trackers -----------------------------------------------------------------------------------------------


def test_other_trackers_join_in(tmp_path: Path) -> None:
    class Listener:
        heard: list[tuple[int | None, dict[str, Any]]] = []

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.heard.append((step, values))

    listener = Listener()
    with tracked(tmp_path, steps=1, others=[listener], console=quiet()) as tracker:
        tracker.step(1, FACTS)
        tracker.evaluation(1, {"R@1": 0.5})
    (_, train), (step, evaluation) = listener.heard
    assert train["train/loss"] == 8.25 and (step, evaluation) == (1, {"eval/R@1": 0.5})


@pytest.mark.filterwarnings("ignore:::tensorboard", "ignore:::torch.utils.tensorboard", "ignore:::google")
def test_tensorboard_reads_the_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path, steps=4, console=quiet()) as tracker:
        for step in (1, 2, 3):
            tracker.step(step, FACTS | {"loss": float(step)})
    with Tracker(tmp_path, steps=4, step=2, console=quiet()) as tracker:
        tracker.step(3, FACTS | {"loss": 30.0})
        tracker.evaluation(3, {"text_to_image_R@10": 0.25})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = {"train/loss", "train/lr", "train/samples_per_second", "train/memory", "eval/text_to_image_R@10"}
    assert tags <= set(board.Tags()["scalars"])
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_of_an_evaluation_break_between_words(tmp_path: Path, terminal: bool) -> None:
    """In a terminal of 80 columns; a file has whole lines."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    metrics = {f"{way}_R@{k}": 0.123456 for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)}
    with tracked(tmp_path, steps=2, console=console) as tracker:
        tracker.evaluation(1, metrics)
    (told,) = re.findall(r"step 1: .*?image to text.*?R@10 \S+", said(console), re.DOTALL)
    words = f"step 1: {in_a_line(metrics)}".split()
    assert told.split() == words
    assert max(map(len, told.splitlines())) <= 80 if terminal else "\n" not in told


@pytest.mark.filterwarnings("ignore:::tensorboard", "ignore:::torch.utils.tensorboard", "ignore:::google")
@pytest.mark.parametrize("resumed", [0, 2])
def test_tensorboard_has_each_step_once(resumed: int, tmp_path: Path) -> None:
    """After a restart before the first checkpoint, and after one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (0, resumed, resumed):
        with Tracker(tmp_path, steps=4, step=first, console=quiet()) as tracker:
            if first == 0:
                tracker.evaluation(0, {"R@1": 0.5})
            for step in range(first + 1, 4):
                tracker.step(step, FACTS)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("eval/R@1")] == [0]
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:::tensorboard", "ignore:::torch.utils.tensorboard", "ignore:::google")
def test_what_was_flushed_is_on_the_disk(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path, steps=4, console=quiet()) as tracker:
        tracker.step(1, FACTS)
        tracker.flush()
        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        assert [event.step for event in board.Scalars("train/loss")] == [1]
