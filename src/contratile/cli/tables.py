"""The tables that `contratile bench` prints, and notes about what was not measured."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from contratile.bench.plots.plan import error_lines
from contratile.bench.rows import (
    CacheRow,
    DataRow,
    FamilyRow,
    LossRow,
    PlanRow,
    Recording,
    RingRow,
    Row,
    ScaleRow,
    hardware_text,
    threads_text,
)

TIMES = (
    "seconds: best and median of the rounds; % limit: time of four plain matrix products over best; x ours: best over "
    "contratile's best; "
)
REST = "MiB: peak beyond inputs and gradients; errors: relative, against fp64"
LOSS_HEADINGS = ("N", "contestant", "best", "median", "% limit", "x ours", "MiB", "err loss", "err grad")
PAPER_RANKS = 8
PAPER = (
    "the paper's own figures, on other hardware (ViT-L/14 on 8 A800 GPUs, GB): batch 32k CLIP 16.67, OpenCLIP 2.27, "
    "Inf-CL 0.18; 64k 66.11, 8.63, 0.36"
)


def tables(recording: Recording[Any]) -> list[Table]:
    """Return the tables of a recording."""
    make: dict[str, Callable[[Recording[Any]], list[Table]]]
    make = {
        "loss": _loss_tables,
        "family": _family_tables,
        "ring": _ring_tables,
        "cache": _cache_tables,
        "data": _data_tables,
        "plan": _plan_tables,
        "scale": _scale_tables,
    }
    return make[recording.kind](recording)


def notes(recording: Recording[Any]) -> list[str]:
    """Return a line for everything that was not measured, with all sizes that share a reason."""
    sizes: dict[tuple[str, str, str], list[str]] = {}
    for row in recording.rows:
        if row.status not in ("ok", "memory only"):
            place = f"D={row.d}"
            if recording.kind in ("ring", "scale"):
                place = f"{place}, P={row.world}"
            elif recording.kind == "family":
                place = f"{row.loss}, {place}"
            elif recording.kind == "data":
                place = f"{row.pixels} pixels, {row.workers} workers, {place}"
            sizes.setdefault((row.contestant, place, row.status), []).append(str(row.n))
    return [f"{name}, {place}, N={', '.join(ns)}: {status}" for (name, place, status), ns in sizes.items()]


def _loss_tables(recording: Recording[LossRow]) -> list[Table]:
    """One table per D: by size, contestants from fast to slow."""
    made = []
    for d in sorted({row.d for row in recording.rows}):
        table = _table(f"D = {d} · {_hardware(recording)}", LOSS_HEADINGS, TIMES + REST)
        _fill(table, [row for row in recording.rows if row.d == d], _loss_cells)
        made.append(table)
    return made


def _loss_cells(row: Any) -> list[str]:
    return [_show(row.peak_extra_mib, "{:.1f}"), _show(row.error_value, "{:.0e}"), _show(row.error_grad, "{:.0e}")]


def _family_tables(recording: Recording[FamilyRow]) -> list[Table]:
    """One table per loss and D, then a summary of all losses against other packages."""
    made = []
    for loss, d in dict.fromkeys((row.loss, row.d) for row in recording.rows):
        rows = [row for row in recording.rows if (row.loss, row.d) == (loss, d)]
        made.append(_table(f"{loss}, D = {d} · limit: {rows[0].limit}", LOSS_HEADINGS, None))
        _fill(made[-1], rows, _loss_cells)
    headings = ("loss", "D", "N", "ours", "% limit", "MiB", "contestant", "best", "x ours", "MiB")
    summary = _table(f"against their peers · {_hardware(recording)}", headings, None)
    ours = {(row.loss, row.d, row.n): row for row in recording.rows if row.contestant == "contratile"}
    for row in recording.rows:
        our = ours.get((row.loss, row.d, row.n))
        if row.package and our and (row.seconds_best or row.peak_extra_mib is not None):
            mine = _show(our.seconds_best, "{:.3f}"), _show(our.percent_of_limit, "{:.0f}")
            theirs = _show(row.seconds_best, "{:.3f}"), _show(row.ratio_to_contratile, "{:.1f}")
            summary.add_row(
                *(row.loss, str(row.d), str(row.n), *mine, _show(our.peak_extra_mib, "{:.1f}")),
                *(row.contestant, *theirs, _show(row.peak_extra_mib, "{:.1f}")),
            )
    summary.caption = f"{TIMES.replace('four', 'the')}{REST}"
    return [*made, summary]


def _ring_tables(recording: Recording[RingRow]) -> list[Table]:
    """Per D and number of ranks: memory in the layout of the paper's table, then time and traffic."""
    made = []
    for d, world in sorted({(row.d, row.world) for row in recording.rows}):
        rows = [row for row in recording.rows if (row.d, row.world) == (d, world)]
        where = f"P = {world}, D = {d} · {_hardware(recording)}"
        made.append(_memory_table(rows, f"memory of the loss, GiB per rank · {where}"))
        made[-1].caption = PAPER if world == PAPER_RANKS else None
        headings = ("N", "contestant", "best", "median", "% limit", "x ours", "MiB sent", "blocks", "% hidden")
        made.append(_table(f"time and traffic · {where}", headings, None))
        _fill(made[-1], rows, _ring_cells)
    made[-1].caption = (
        f"{TIMES}MiB sent: by a rank in a step, counted by the kernel; blocks: the same in units of N/P x D numbers; "
        "% hidden: lower and upper bound of the transfer time hidden behind compute; memory: peak of the largest rank "
        "beyond inputs and gradients, - if it does not fit into this machine"
    )
    return made


def _plan_tables(recording: Recording[PlanRow]) -> list[Table]:
    """One table of all runs, and the errors as its caption."""
    headings = ("contestant", "batch", "chunk", "tokens", "options", "MiB", "predicted", "calibrated", "s", "predicted")
    made = _table(f"training steps · {_hardware(recording)}", headings, None)
    for row in recording.rows:
        options = ["checkpointing"] * row.checkpointing + [row.offload] * (row.offload != "none")
        options += [f"{row.world} ranks"] * (row.world > 1)
        cells = row.contestant, str(row.n), str(row.chunk), str(row.tokens), ", ".join(options)
        memory = (
            _show(row.measured_mib, "{:.0f}"),
            _show(row.predicted_mib, "{:.0f}"),
            _show(row.calibrated_mib, "{:.0f}"),
        )
        made.add_row(*cells, *memory, _show(row.seconds_best, "{:.2f}"), _show(row.predicted_seconds, "{:.2f}"))
    made.caption = "; ".join(error_lines(recording.rows))
    return [made]


def _scale_tables(recording: Recording[ScaleRow]) -> list[Table]:
    """Per D and number of ranks: memory of a rank, then the same divided by ours."""
    made = []
    for d, world, real in sorted({(row.d, row.world, "real ranks" in row.how) for row in recording.rows}):
        rows = [row for row in recording.rows if (row.d, row.world, "real ranks" in row.how) == (d, world, real)]
        sizes = sorted({row.n for row in rows})
        kind = "real ranks" if real else "one rank"
        title = f"{kind} of {world}, D = {d}, GB beyond inputs and gradients, (x ours) · {_hardware(recording)}"
        made.append(_table(title, ("contestant", *map(_batch, sizes)), None))
        cells = {(_scale_name(row), row.n): _scale_cell(row) for row in rows}
        for name in dict.fromkeys(_scale_name(row) for row in rows):
            made[-1].add_row(name, *(cells.get((name, n), "") for n in sizes), style=_style(name))
    made[-1].caption = (
        "~: by formula; others measured. The paper's figure 1: its loss needs 78 times less at 256k on 8 GPUs, "
        f"281 times at 1024k on 128; {PAPER}; 256k Inf-CL 1.45"
    )
    return made


def _scale_name(row: ScaleRow) -> str:
    return f"{row.contestant}, simulated" if row.how == "simulated beside real ranks" else row.contestant


def _scale_cell(row: ScaleRow) -> str:
    mib = row.formula_mib if row.peak_extra_mib is None else row.peak_extra_mib
    times = "" if row.memory_ratio is None or row.contestant == "contratile" else f" ({row.memory_ratio:.3g}x)"
    return f"{'~' if row.peak_extra_mib is None else ''}{mib * 2**20 / 1e9:.3g}{times}"


def _cache_tables(recording: Recording[CacheRow]) -> list[Table]:
    """One table per width."""
    made = []
    for d in sorted({row.d for row in recording.rows}):
        rows = [row for row in recording.rows if row.d == d]
        model = f"{rows[0].layers} layers of width {d}, {rows[0].tokens} tokens, chunks of {rows[0].chunk}"
        headings = ("N", "contestant", "best", "median", "% limit", "x ours", "MiB", "% loss")
        made.append(_table(f"{model} · {_hardware(recording)}", headings, None))
        _fill(made[-1], rows, _cache_cells)
    made[-1].caption = (
        f"{TIMES.replace('four plain matrix products', 'all chunks forward, then forward and backward,')}MiB: peak "
        "beyond model, inputs and gradients; % loss: share of the step spent on the loss"
    )
    return made


def _cache_cells(row: Any) -> list[str]:
    return [_show(row.peak_extra_mib, "{:.1f}"), _show(row.loss_percent, "{:.1f}")]


def _data_tables(recording: Recording[DataRow]) -> list[Table]:
    """One table per size of images: by number of workers, contestants from fast to slow."""
    made = []
    headings = ("workers", "contestant", "best", "median", "% limit", "x ours", "MiB", "MiB workers")
    for pixels, d in dict.fromkeys((row.pixels, row.d) for row in recording.rows):
        rows = [row for row in recording.rows if (row.pixels, row.d) == (pixels, d)]
        what = (
            f"JPEGs of {pixels} x {pixels} pixels ({rows[0].jpeg_kib:.0f} KiB) to {d} x {d}, batches of {rows[0].batch}"
        )
        made.append(_table(f"{what} · {_hardware(recording)}", headings, None))
        for workers in sorted({row.workers for row in rows}):
            group = [row for row in rows if row.workers == workers and row.samples_per_second]
            group.sort(key=lambda row: -(row.samples_per_second or 0))
            for row in group:
                cells = [
                    str(row.workers),
                    row.contestant,
                    _show(row.samples_per_second, "{:.0f}"),
                    _show(row.samples_per_second_median, "{:.0f}"),
                    _show(row.percent_of_limit, "{:.0f}"),
                    _show(row.ratio_to_contratile, "{:.2f}"),
                    _show(row.peak_extra_mib, "{:.0f}"),
                    _show(row.workers_mib, "{:.0f}"),
                ]
                made[-1].add_row(*cells, style=_style(row.contestant), end_section=row is group[-1])
    made[-1].caption = (
        "samples per second: best and median of the rounds; % limit: time to decode the JPEGs whole over best time; "
        "x ours: best time over contratile's; MiB: growth of the training process, and memory of all workers"
    )
    return made


def _ring_cells(row: Any) -> list[str]:
    bounds = row.hidden_percent, row.hidden_percent_at_most
    hidden = "" if None in bounds else "{:.0f}-{:.0f}".format(*bounds)
    return [_show(row.sent_mib, "{:.1f}"), _show(row.sent_blocks, "{:.1f}"), hidden]


def _memory_table(rows: list[RingRow], title: str) -> Table:
    """One line per contestant, one column per global batch size."""
    sizes = sorted({row.n for row in rows})
    table = _table(title, ("contestant", *map(_batch, sizes)), None)
    cells = {(row.contestant, row.n): _memory_cell(row) for row in rows}
    for name in dict.fromkeys(row.contestant for row in rows):
        if any(cells[name, n] for n in sizes):
            table.add_row(name, *(cells[name, n] for n in sizes), style=_style(name))
    return table


def _memory_cell(row: RingRow) -> str:
    if row.peak_extra_mib is not None:
        return f"{row.peak_extra_mib / 1024:.3f}"
    return "-" if row.status.startswith("out of memory") else ""


def _table(title: str, headings: Sequence[str], caption: str | None) -> Table:
    looks: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "min_width": 90}
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", **looks)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in ("contestant", "loss") else "right", no_wrap=True)
    return made


def _fill(table: Table, rows: Sequence[Row], cells: Any) -> None:
    """Add the rows that were measured: the columns of all benchmarks, then those that `cells` returns."""
    for n in sorted({row.n for row in rows}):
        group = [row for row in rows if row.n == n and (row.seconds_best or row.peak_extra_mib is not None)]
        group.sort(key=lambda row: row.seconds_best or float("inf"))
        for row in group:
            shared = [
                str(row.n),
                row.contestant,
                _show(row.seconds_best, "{:.3f}"),
                _show(row.seconds_median, "{:.3f}"),
                _show(row.percent_of_limit, "{:.0f}"),
                _show(row.ratio_to_contratile, "{:.2f}"),
            ]
            table.add_row(*shared, *cells(row), style=_style(row.contestant), end_section=row is group[-1])


def _hardware(recording: Recording[Any]) -> str:
    facts = recording.environment
    return f"{hardware_text(facts)} · {threads_text(recording)} · torch {facts['torch']}"


def _batch(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _style(contestant: str) -> str | None:
    return "bold" if contestant == "contratile" else None


def _show(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
