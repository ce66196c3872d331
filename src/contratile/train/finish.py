"""The end of a run: its gallery, a contact sheet, the report; and what a finished run can be asked.

finish(config, source, outcome)                     # writes gallery, contact_sheet.png, report.html
towers, config, step = load_run(run)                # the best checkpoint's weights
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from contratile.data.sample import Indexed, Source
from contratile.errors import bad_value
from contratile.metrics import nearest
from contratile.tiles import plan_tiles
from contratile.train import checkpoint
from contratile.train.config import CONFIG, TrainConfig, load_config, to_dict
from contratile.train.evaluate import Encoded, chance, save_gallery
from contratile.train.report import SheetRow, contact_sheet, png, write_report
from contratile.train.towers import Towers, build_towers
from contratile.train.track import DENSE_MATRICES, history, size

if TYPE_CHECKING:
    from PIL.Image import Image

    from contratile.train.loop import Outcome

ROWS, COLUMNS = 8, 8
"""Of the contact sheet."""

LARGE = 512
"""Pixels of an edge that are more than enough for a sheet."""


class Written(NamedTuple):
    """The files of a finished run, and what the report says beside the figures."""

    report: Path
    sheet: Path | None
    notes: list[str]


def finish(config: TrainConfig, source: Source, outcome: Outcome) -> Written:
    """Write what is looked at after a run. `source` is the held-out data."""
    run, encoded = config.run.out, outcome.encoded
    assert encoded is not None, "only the main process of a run that was finished has something to write"
    save_gallery(encoded, run, outcome.step)
    sheet = held_out_sheet(source, encoded)
    path = None
    if sheet is not None:
        path = run / "contact_sheet.png"
        partial = path.with_suffix(".partial")
        partial.write_bytes(sheet)
        partial.replace(path)
    n = config.run.batch
    workspace = plan_tiles(n, n, encoded.left.shape[1]).workspace_bytes
    notes = [
        f"{len(encoded.keys):,} held-out pairs of {source.name}; none of their texts was seen in training."
        if source.name.startswith("icons")
        else f"{len(encoded.keys):,} held-out pairs of {source.name}{left_out(encoded)}.",
        f"Every step compared {n:,} pairs with each other. The loss did it in a workspace of {size(workspace)}; "
        f"a dense loss would have taken {size(DENSE_MATRICES * 4 * n * n)}.",
    ]
    report = write_report(
        run,
        title=f"{config.towers.towers} on {config.data.data}",
        config=to_dict(config),
        history=history(run),
        final=outcome.metrics,
        chance=chance(len(encoded.keys)),
        sheet=sheet or b"",
        notes=notes,
    )
    return Written(report, path, notes)


def left_out(encoded: Encoded) -> str:
    """How many pairs are missing because they are broken."""
    return f" ({encoded.broken:,} broken ones are left out)" if encoded.broken else ""


def held_out_sheet(source: Source, encoded: Encoded) -> bytes | None:
    """A few held-out texts, spread over the data, with their nearest images. None where there are no images to show."""
    if source.kinds[0] != "image" or not isinstance(source, Indexed):
        return None
    texts = list(dict.fromkeys(encoded.texts))
    asked = texts[:: max(1, len(texts) // ROWS)][:ROWS]
    first = torch.tensor([encoded.texts.index(text) for text in asked])
    rows = found_rows(source, asked, encoded.right[first], encoded.left, encoded.places, encoded.texts)
    return png(contact_sheet(rows, columns=COLUMNS))


def found_rows(
    source: Source,
    queries: Sequence[str],
    features: Tensor,
    gallery: Tensor,
    places: Tensor,
    texts: Sequence[str],
    k: int = COLUMNS,
) -> list[SheetRow]:
    """The k nearest of each query, with their images where the source has them."""
    scores, best = nearest(features, gallery, k)
    rows = []
    for query, row, found in zip(queries, scores.tolist(), best.tolist(), strict=True):
        captions = [texts[number] for number in found]
        images = [picture(source, int(places[number])) for number in found]
        rows.append(SheetRow(query, images, captions, [text == query for text in captions], row))
    return rows


def picture(source: Source, index: int) -> Image:
    """Large ones reduced, as all of a sheet are held at once."""
    assert isinstance(source, Indexed)
    image = source[index].left
    assert not isinstance(image, str)
    if max(image.size) > LARGE:
        image = image.copy()  # what a source gives is its own
        image.thumbnail((LARGE, LARGE))
    return image


class Run(NamedTuple):
    """What a run has learned."""

    towers: Towers
    config: TrainConfig
    step: int
    """Of the checkpoint that the weights are from."""


def load_run(run: Path, weights: str = "best") -> Run:
    """The towers of a run with the weights of a checkpoint: its best, its last, or that of a step (step-00000100).

    A run without a best one, which was never evaluated, has its last instead.
    """
    if not (run / CONFIG).exists():
        remedy = "Give the folder that `contratile train --out` wrote."
        bad_value("run", expected=f"a folder with {CONFIG}", got=run, remedy=remedy)
    config = load_config(run / CONFIG)
    best = run / "best"
    folder: Path | None = run / "checkpoints" / weights
    if weights == "last" or (weights == "best" and not best.exists()):
        folder = checkpoint.latest(run)
    elif weights == "best":
        folder = best
    if folder is None:
        bad_value("run", expected="a checkpoint", got=run, remedy="The run was stopped before its first one.")
    towers = build_towers(config.towers, folder=run, bias=config.loss.loss == "siglip")
    state, facts = checkpoint.load(folder.resolve())
    towers.load_state_dict(state["model"])
    return Run(towers.eval(), config, facts["step"])
