"""Embed a data source: its features go to disk as they are made.

    embed_source(towers, source, Path("features.npy"))        # features.npy [N, D], features.keys.jsonl

An interrupted call is continued by the next one with the same arguments, also with another number of processes. Rows
are in the source's own order. Memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from contratile.data.loader import BROKEN_LIMIT, too_many_broken
from contratile.data.sample import Indexed, Stream
from contratile.embed.data_files import check_apart, data_state
from contratile.embed.output import Output
from contratile.embed.reading import ChunkReader, Share, Skip, unit_tasks
from contratile.embed.record import Record
from contratile.embed.units import EmbeddedRow, Unit, Units, UnitWriter
from contratile.embed.work_folder import claim_folder, remove_folder, work_folder
from contratile.errors import bad_value, check_choice, check_count
from contratile.models.encoding import evaluating, to_device
from contratile.models.towers import Towers
from contratile.report.metric_text import side_names

Side: TypeAlias = Literal["left", "right", "both"]
SAVE_EVERY = 8
"""Chunks after which progress is recorded."""


class Embedded(NamedTuple):
    """What `embed_source` wrote."""

    rows: int
    width: int
    """Features per row."""

    broken: int
    """Samples that were left out because they could not be read."""

    files: list[Path]
    """Features, keys, and the list of broken samples if there are any."""


class Ranks(NamedTuple):
    """The processes that share the work."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], object] = lambda: None
    """Returns when all of them have called it."""


@torch.no_grad()
def embed_source(
    towers: Towers,
    source: Indexed | Stream,
    out: Path,
    *,
    side: Side = "left",
    chunk: int = 256,
    limit: int = 0,
    workers: int = 0,
    broken_limit: float = BROKEN_LIMIT,
    save_every: int = SAVE_EVERY,
    facts: Mapping[str, Any] | None = None,
    run: Path | None = None,
    step: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008  # immutable
    notify: Callable[[int], object] = lambda done: None,
) -> Embedded:
    """Write the features of a data source to disk, with a key for each row.

    Args:
        towers: The pair of encoders, for example from `load_run`.
        source: The pairs, from `open_source`.
        out: A name that ends in .npy or .parquet. Beside NAME.npy the keys are written to NAME.keys.jsonl; with both
            sides there are NAME.left.npy and NAME.right.npy. A .parquet has columns key, name, text, index and one for
            each side. NAME.embedded.json, written too, describes them for `contratile search`.
        side: What to encode: "left", "right" or "both".
        chunk: Samples that go through the encoders at a time.
        limit: Embed only the first `limit` samples; 0 means all.
        workers: Processes that read and prepare samples; 0: this process does.
        broken_limit: How many samples may be unreadable before this raises: below 1 a share, else a number. They are
            left out of features and keys, and listed in NAME.npy.broken.jsonl.
        save_every: Record progress after this many chunks. At most that much work is lost if the process is killed.
        facts: More that must be the same when an interrupted call is continued. It is recorded. `data`, the name of
            the data, also makes sure that its files have not changed meanwhile, and are not written over.
        run: Folder of the run that the encoders are from, which is recorded so that `contratile search` finds it.
        step: Step of the run's checkpoint.
        ranks: This process among those that share the work. They must see the same files.
        notify: Called with the number of samples that this process has read, after every chunk.

    Returns:
        The number of rows and the files. They exist when the call returns, on every rank.

    Raises:
        ValueError: `out` cannot be written, was begun with other arguments, or too many samples are broken.
        FloatingPointError: A feature is NaN or infinite.

    Examples:
        >>> towers, config, step = load_run(Path("runs/icons"))              # doctest: +SKIP
        >>> embed_source(towers, open_source(config.data, "test"), Path("features.npy")).rows    # doctest: +SKIP
        1445
    """
    check_choice("side", side, get_args(Side))
    for name, value in {"chunk": chunk, "save_every": save_every}.items():
        check_count(name, value, least=1)
    for name, value in {"limit": limit, "workers": workers}.items():
        check_count(name, value, least=0)
    sides = ("left", "right") if side == "both" else (side,)
    _check_kinds(towers, source, sides)
    output = Output.of(out, sides)
    name = str((facts or {}).get("data", ""))
    check_apart([*output.parts, output.record, output.broken], name)
    units = Units(work_folder(out), {each: getattr(towers, each).width for each in sides})
    held = None
    if ranks.rank == 0:
        length = len(source) if isinstance(source, Indexed) else None
        weights = digest(towers)
        plan: dict[str, Any] = {"source": source.name, "length": length, "weights": weights, **(facts or {})}
        plan["files"] = data_state(name)
        held = claim_folder(units.folder)
        units.open({**plan, "side": side, "chunk": chunk, "limit": limit, "save_every": save_every})
    ranks.wait()
    share = Share(chunk=chunk, chunks=save_every, limit=limit, rank=ranks.rank, world=ranks.world)
    before = units.done()
    ranks.wait()  # all have seen the same units
    # With several processes broken samples are judged at the end, over all of them.
    options: dict[str, Any] = {"workers": workers, "broken_limit": broken_limit if ranks.world == 1 else inf}
    with evaluating(towers):
        _encode(towers, source, sides, units, share, before, options, notify)
    ranks.wait()
    done = units.done()
    ranks.wait()  # all have read them, so that they can be removed
    _check_broken(source, done, broken_limit)
    rows = sum(unit.rows for unit in done.values())
    if ranks.rank == 0:
        assert list(done) == list(range(len(done))), "units without a gap"
        made_by: dict[str, Any] = {"run": str(run.resolve()) if run else "", "step": step, "weights": weights}
        made_from: dict[str, Any] = {"kinds": source.kinds, "names": side_names(source), "data": dict(facts or {})}
        record = Record(**made_by, **made_from, sides=sides, rows=rows, width=units.widths[sides[0]])
        output.write(units, done, record)
        remove_folder(units.folder)
    ranks.wait()
    del held
    return Embedded(rows, units.widths[sides[0]], sum(len(unit.broken) for unit in done.values()), output.files)


def _encode(
    towers: Towers,
    source: Indexed | Stream,
    sides: tuple[str, ...],
    units: Units,
    share: Share,
    before: Mapping[int, Unit],
    options: Mapping[str, Any],
    notify: Callable[[int], object],
) -> None:
    """Make the units of this process that are not done."""
    device = towers.log_scale.device
    left, right = (getattr(towers, each).prepare if each in sides else Skip() for each in ("left", "right"))
    once: dict[str, Any] = {"shuffle": False, "epochs": 1, "drop_last": False, "training": False}
    reader = ChunkReader(source, (left, right), batch=share.chunk, chunk=share.chunk, **once, **options)
    writer: UnitWriter | None = None
    seen = in_unit = 0
    for task, chunk, broken in reader.read(unit_tasks(source, share, before)):
        writer = writer or units.writer(task.step)
        if chunk is not None:
            features = {each: getattr(towers, each)(to_device(getattr(chunk, each), device)) for each in sides}
            features = {each: values.float().cpu() for each, values in features.items()}
            _check_finite(features, chunk.keys)
            places = [None if place < 0 else place for place in chunk.index.tolist()]
            rows = [EmbeddedRow(*row) for row in zip(chunk.keys, chunk.names, chunk.texts, places, strict=True)]
            writer.add(rows, features, broken)
        else:
            writer.add([], {}, broken)
        in_unit += len(task.items)
        if task.last:
            writer.finish(seen=in_unit, cursor=task.after["cursor"])
            writer, in_unit = None, 0
        seen += len(task.items)
        notify(seen)


def _check_kinds(towers: Towers, source: Indexed | Stream, sides: tuple[str, ...]) -> None:
    """Refuse sides that the towers cannot encode."""
    for place, side in enumerate(("left", "right")):
        if side in sides and towers.kinds[place] != source.kinds[place]:
            remedy = f"Embed the other side (--side {('right', 'left')[place]}), or other data."
            expected = f"{towers.kinds[place]}s, as the {side} encoder of the run takes them"
            bad_value(f"{side} side of {source.name}", expected=expected, got=f"{source.kinds[place]}s", remedy=remedy)


def _check_finite(features: Mapping[str, torch.Tensor], keys: list[str]) -> None:
    for side, values in features.items():
        bad = (~values.isfinite()).any(1)
        if bool(bad.any()):
            first = keys[int(bad.int().argmax())]
            raise FloatingPointError(
                f"the {side} features of {first} are not finite. Use another checkpoint with --weights."
            )


def _check_broken(source: Indexed | Stream, done: Mapping[int, Unit], limit: float) -> None:
    """Raise if too many samples are broken, or all of them."""
    seen = sum(unit.seen for unit in done.values())
    broken = [error for unit in done.values() for error in unit.broken]
    if too_many_broken(len(broken), seen, limit):
        expected = f"at most {f'{limit:.2%}' if 0 < limit < 1 else f'{limit:g}'} broken"
        remedy = "Repair or remove them, or raise the limit (--broken-limit); what is done is kept."
        got = f"{len(broken)} of {seen} (first {': '.join(broken[0])})"
        bad_value(f"samples of {source.name}", expected=expected, got=got, remedy=remedy)
    if len(broken) == seen:
        got = f"none ({': '.join(broken[0])})" if broken else "none"
        bad_value(f"samples of {source.name}", expected="at least one", got=got, remedy="Check the data.")


def digest(towers: Towers) -> str:
    """A digest of the weights, which identifies the model."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in sorted(towers.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
