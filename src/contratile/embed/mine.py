"""Mine hard negatives of a data source with a pair of encoders, and write a table that `contratile train` reads.

    mine_source(towers, source, Path("mined.jsonl"), Rules(num_negatives=5, relative_margin=0.05))

Queries are the distinct left sides, keys the distinct texts. A text is never a negative of a left side that it occurs
with, in any row. Features are on disk; what is in memory is a tile of scores, the result, and about 200 bytes per pair.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.data.files import written_whole
from contratile.data.sample import Indexed, Stream
from contratile.embed.data_files import check_apart, data_state
from contratile.embed.embed import Ranks, digest, embed_source
from contratile.embed.table import MinedTable, Pictures, check_table
from contratile.embed.work_folder import claim_folder, read_object, remove_folder, work_folder
from contratile.errors import bad_value
from contratile.mining.hard_negatives import mine_hard_negatives
from contratile.mining.options import Rules
from contratile.models.towers import Towers

FEATURES = "features.npy"
EMBEDDED = "embedded.json"


class Mined(NamedTuple):
    """What `mine_source` found."""

    pairs: int
    queries: int
    keys: int
    """Distinct left sides and texts."""

    negatives: int
    """Negatives in the table, over all pairs."""

    short: int
    """Queries with fewer negatives than asked for."""

    none: int
    """Queries without any negative."""

    positive: float
    """Mean score of the positives (of several, the lowest) of queries with negatives; NaN if there are none."""

    negative: float
    """Mean score of their negatives, each query weighing the same; NaN if there are none."""

    broken: int
    """Samples that could not be read."""


class DistinctPairs(NamedTuple):
    """Distinct left sides and texts of the embedded rows."""

    query: Tensor  # [N]: number of each row's left side
    key: Tensor  # [N]: number of each row's text
    first_query: Tensor  # [U]: first row of each left side
    first_key: Tensor  # [V]: first row of each text

    @classmethod
    def read(cls, keys: Path) -> DistinctPairs:
        """Number equal names and equal texts in a file of keys."""
        numbers: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
        found = [array("q") for _ in range(4)]
        with keys.open(encoding="utf-8") as lines:
            for row, line in enumerate(lines):
                told = json.loads(line)
                for side, name in enumerate(("name", "text")):
                    mark = hashlib.blake2b(told[name].encode(errors="surrogatepass"), digest_size=16).digest()
                    number = numbers[side].setdefault(mark, len(numbers[side]))
                    found[side].append(number)
                    if number == len(found[2 + side]):
                        found[2 + side].append(row)
        return cls(*(torch.tensor(each, dtype=torch.long) for each in found))


def mine_source(
    towers: Towers,
    source: Indexed | Stream,
    out: Path,
    rules: Rules,
    *,
    scores: bool = False,
    facts: Mapping[str, Any] | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  # immutable
    notify: Callable[[str], object] = lambda told: None,
    **embedding: Any,
) -> Mined | None:
    """Mine hard negatives of every pair of a data source.

    Args:
        towers: The pair of encoders, for example from `load_run`.
        source: The pairs, from `open_source`.
        out: The table to write, .jsonl or .parquet: columns anchor and positive (image and caption if the left sides
            are pictures) and a list of negatives. Pictures that are not files are written to a folder beside it.
        rules: Which keys are negatives; the arguments of `mine_hard_negatives`.
        scores: Add a column `scores`: the score of the positive (of several, the lowest), then of each negative.
        facts: As for `embed_source`.
        ranks: This process among those that share the work. Several need an initialised process group.
        notify: Called with a text about the progress.
        **embedding: Options of `embed_source`: chunk, limit, workers, broken_limit, save_every.

    Returns:
        Counts and mean scores; None on other ranks than the first.

    Raises:
        ValueError: The table cannot be written or the data cannot be mined.

    Examples:
        >>> towers, config, step = load_run(Path("runs/words"))              # doctest: +SKIP
        >>> rules = Rules(num_negatives=5, relative_margin=0.05)             # doctest: +SKIP
        >>> mine_source(towers, open_source(config.data, "train"), Path("mined.jsonl"), rules)    # doctest: +SKIP
    """
    check_table(out)
    check_apart([out], str((facts or {}).get("data", "")))
    pictures = Pictures.of(source, out)
    work = work_folder(out)
    held = claim_folder(work) if ranks.rank == 0 else None
    ranks.wait()
    broken = _embed(towers, source, work, facts or {}, ranks, notify, embedding)
    features = work / FEATURES
    pairs = DistinctPairs.read(features.with_suffix(".keys.jsonl"))
    if len(pairs.first_key) < 2:
        remedy = "Every text but its own is a candidate."
        bad_value(f"texts of {source.name}", expected="at least two different ones", got=1, remedy=remedy)
    _mine(features, pairs, rules, work, ranks, notify, towers.log_scale.device)
    ranks.wait()
    mined = None
    if ranks.rank == 0:
        parts = [torch.load(work / f"negatives-{rank}.pt") for rank in range(ranks.world)]
        indices, found, positive = (torch.cat(each) for each in zip(*parts, strict=True))
        notify("writing")
        table = MinedTable(features.with_suffix(".keys.jsonl"), pairs.query, pairs.first_key, pictures, scores=scores)
        table.write(out, indices, found, positive)
        counts = (indices >= 0).sum(1)
        some = counts > 0  # means over the same queries, so that they can be compared
        mined = Mined(
            pairs=len(pairs.query),
            queries=len(pairs.first_query),
            keys=len(pairs.first_key),
            negatives=int(counts[pairs.query].sum()),
            short=int((counts < rules.num_negatives).sum()),
            none=int((counts == 0).sum()),
            positive=float(positive[some].mean()),
            negative=float(found[some].nanmean(1).mean()),
            broken=broken,
        )
        remove_folder(work)
    ranks.wait()
    del held
    return mined


def _embed(
    towers: Towers,
    source: Indexed | Stream,
    work: Path,
    facts: Mapping[str, Any],
    ranks: Ranks,
    notify: Callable[[str], object],
    options: Mapping[str, Any],
) -> int:
    """Write features of both sides to the work folder, unless they are there; returns the number of broken samples."""
    length = len(source) if isinstance(source, Indexed) else None
    plan = {"source": source.name, "length": length, "limit": options.get("limit", 0), "weights": digest(towers)}
    plan = json.loads(json.dumps({**plan, **facts, "files": data_state(str(facts.get("data", "")))}))
    done = work / EMBEDDED
    before = read_object(done)
    there = all((work / FEATURES).with_suffix(f".{kind}").exists() for kind in ("left.npy", "right.npy", "keys.jsonl"))
    ranks.wait()  # all processes have checked
    if before.get("plan") == plan and there:
        return int(before["broken"])
    if ranks.rank == 0:
        done.unlink(missing_ok=True)
    told = embed_source(
        towers,
        source,
        work / FEATURES,
        side="both",
        facts=facts,
        ranks=ranks,
        notify=lambda count: notify(f"encoding: {count:,} pairs"),
        **options,
    )
    if ranks.rank == 0:
        with written_whole(done) as draft:
            draft.write_text(json.dumps({"plan": plan, "broken": told.broken}), encoding="utf-8")
    return told.broken


def _mine(
    features: Path,
    pairs: DistinctPairs,
    rules: Rules,
    work: Path,
    ranks: Ranks,
    notify: Callable[[str], object],
    device: torch.device,
) -> None:
    """Search the negatives of this rank's queries and write them to the work folder."""
    rank, world = ranks.rank, ranks.world
    begin, end = (len(pairs.first_query) * each // world for each in (rank, rank + 1))
    keys = slice(*(len(pairs.first_key) * each // world for each in (rank, rank + 1)))
    mine = (pairs.query >= begin) & (pairs.query < end)
    # One row for each row of the data: its repeats count for the default window, as in sentence-transformers.
    positives = torch.stack([pairs.query[mine] - begin, pairs.key[mine]], 1)
    found = mine_hard_negatives(
        _rows(features.with_suffix(".left.npy"), pairs.first_query[begin:end]).to(device),
        _rows(features.with_suffix(".right.npy"), pairs.first_key[keys]).to(device),
        positives=positives.to(device),
        group="auto" if world > 1 else None,
        notify=lambda share: notify(f"mining: {share:.0%}"),
        **asdict(rules),
    )
    torch.save(tuple(x.cpu() for x in found), work / f"negatives-{rank}.pt")


def _rows(file: Path, rows: Tensor) -> Tensor:
    """Some rows of an array on disk, in ascending order; not copied if they are consecutive."""
    import numpy as np

    whole = torch.from_numpy(np.load(file, mmap_mode="c"))  # "c": torch warns of arrays that cannot be written
    if len(rows) and int(rows[-1] - rows[0]) + 1 == len(rows):
        return whole[int(rows[0]) : int(rows[-1]) + 1]
    return whole[rows]
