"""What a finished run leaves: gallery, contact sheets and report.

written = write_results(trainer, trainer.run())     # gallery, contact_sheet.png, report.html, finished.json
is_finished(run, step)                              # whether all of it is there
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from contratile.data.files import written_whole
from contratile.errors import bad_value
from contratile.models.encoding import SourceFeatures
from contratile.planner.loss_memory import dense_loss_bytes, tiled_loss_bytes
from contratile.report.corpus import searched_side
from contratile.report.gallery import GALLERY, Gallery, make_gallery, save_gallery
from contratile.report.gallery_corpus import found_rows
from contratile.report.html import SHEET_TEXT, VIEWS_TEXT, write_report
from contratile.report.sheets import SheetRow, contact_sheet, png
from contratile.report.tracking import binary_size, history
from contratile.train.config_file import to_dict
from contratile.train.evaluate import chance
from contratile.train.gallery_search import example_query, search
from contratile.train.large_loss import large_loss_step

if TYPE_CHECKING:
    from contratile.train.loop import Outcome, Trainer

FINISHED = "finished.json"
"""Written last: the step, and the files that were written for it."""

ROWS, COLUMNS = 8, 8
"""Queries, and pictures per query, of a contact sheet."""

TEXTS = 3
"""Results per query for text pairs."""


class Written(NamedTuple):
    """The files of a finished run, and what is to be said about it."""

    report: Path
    sheet: Path | None
    """Contact sheet of held-out queries; None for text pairs."""

    notes: list[str]
    """Sentences about the run, as they stand in the report."""

    searched: list[SheetRow]
    """Results of `config.run.queries`."""

    query: str
    """What to try with `contratile search`: a text, or a placeholder for a picture."""


def write_results(trainer: Trainer, outcome: Outcome, notify: Callable[[str], object] = lambda text: None) -> Written:
    """Write the gallery, contact sheets and report of a finished run. Only the main process calls it.

    Args:
        trainer: The run.
        outcome: What `trainer.run()` returned, with held-out features.
        notify: Called with a status text.

    Returns:
        What was written.

    Raises:
        ValueError: The outcome has no held-out features: the run had been finished before, or was stopped.

    Examples:
        >>> outcome = trainer.run()                                          # doctest: +SKIP
        >>> if outcome.held_out is not None: write_results(trainer, outcome)    # doctest: +SKIP
    """
    config, source, run = trainer.config, trainer.held_out, trainer.config.run.out
    held_out = outcome.held_out
    if held_out is None:
        remedy = "Call it on the main process if outcome.held_out is not None; an earlier run has its results already."
        bad_value("outcome", expected="one of a run that finished just now", got="one without features", remedy=remedy)
    (run / FINISHED).unlink(missing_ok=True)
    training = None if outcome.training is None else (outcome.training, trainer.source)
    gallery = make_gallery(held_out, source, outcome.step, training)._replace(sides=trainer.sides)
    save_gallery(gallery, run)
    pictures = gallery.kinds[0] == "image"
    found = held_out_rows(gallery, held_out, COLUMNS if pictures else TEXTS)
    queries = () if trainer.sharded else config.run.queries  # sharded towers need all processes to encode
    searched = search(trainer.towers, gallery, queries, COLUMNS if pictures else TEXTS)
    sheet = png(contact_sheet(found, columns=COLUMNS)) if pictures else b""
    path = run / "contact_sheet.png" if pictures else None
    if path is not None:
        with written_whole(path) as draft:
            draft.write_bytes(sheet)
    notes = _notes(trainer, held_out, gallery)
    if config.run.large_loss:
        device = trainer.accelerator.device
        notes.append(large_loss_step(held_out.left.shape[1], device=device, notify=notify).sentence)
    guessed = chance(held_out) | (trainer.zero_shot.chance if trainer.zero_shot is not None else {})
    report = write_report(
        run,
        title=f"Training report: {config.towers.towers} encoders on {source.name.replace(' (test)', '')}",
        config=to_dict(config),
        history=history(run),
        final=outcome.metrics,
        chance=guessed,
        sheet=sheet,
        sheet_text=VIEWS_TEXT if held_out.views else SHEET_TEXT,
        found=() if pictures else found,
        searched=png(contact_sheet(searched, columns=COLUMNS)) if pictures and searched else b"",
        notes=notes,
        sides=gallery.sides,
    )
    files = [f"{GALLERY}.safetensors", f"{GALLERY}.json", report.name, *([path.name] if path else [])]
    with written_whole(run / FINISHED) as draft:
        draft.write_text(json.dumps({"step": outcome.step, "files": files}) + "\n", encoding="utf-8")
    views = config.augment.views == 2
    query = "PICTURE.png" if views else next(iter(queries), "") or example_query(gallery)
    return Written(report, path, notes, searched, query)


def _notes(trainer: Trainer, held_out: SourceFeatures, gallery: Gallery) -> list[str]:
    """Sentences about the data and the memory of the loss."""
    config, source = trainer.config, trainer.held_out
    pairs = f"{len(held_out.keys):,} held-out pairs of {source.name}"
    notes = [
        f"Metrics are of {pairs}; none of their texts was seen in training."
        if source.name.startswith("icons") and not held_out.views
        else f"Metrics are of {pairs}{left_out(held_out)}."
    ]
    names, texts = len(set(held_out.names)), len(set(held_out.texts))
    if held_out.views:
        notes.append("A view is a random crop of an image with random colour changes; its match is that image.")
    elif names != len(held_out.keys) or texts != len(held_out.keys):
        counts = ", ".join(f"{n:,} {side}" for n, side in zip((names, texts), gallery.sides, strict=True))
        notes.append(f"Repeated items count once ({counts}); any matching item counts as a hit.")
    if bool(gallery.trained.any()):
        notes.append(f"Search covers {gallery.counts()}.")
    if trainer.zero_shot is not None:
        notes.append(f"Zero-shot metrics are of {trainer.zero_shot.source.name}.")
    n, loss = config.run.batch, config.loss
    shared = trainer.negatives if loss.hard_negatives == "all" else 0
    ours = tiled_loss_bytes(
        n,
        held_out.left.shape[1],
        processes=trainer.accelerator.num_processes,
        views=loss.rows_per_pair,
        negatives=shared,
        cache_bytes=loss.cache_mib << 20,
    )
    dense = binary_size(dense_loss_bytes(n, views=loss.rows_per_pair, negatives=shared))
    others = f" and with up to {shared:,} hard negatives each" if shared else ""
    if loss.backend == "dense":
        notes.append(f"Every step compared {n:,} pairs with each other{others}; the dense loss took {dense}.")
    else:
        told = f"Every step compared {n:,} pairs with each other{others}. The loss took {binary_size(ours)} for it"
        notes.append(f"{told}; a dense loss would have taken {dense}.")
    return notes


def left_out(found: SourceFeatures) -> str:
    """A remark about broken samples, if there were any."""
    return f" ({found.broken:,} broken ones are left out)" if found.broken else ""


def is_finished(run: Path, step: int) -> bool:
    """Whether the results of a run that ended with this step are all there.

    Args:
        run: Folder of the run.
        step: Its last step.
    """
    try:
        told = json.loads((run / FINISHED).read_text(encoding="utf-8"))
        return bool(told["step"] == step and all((run / name).is_file() for name in told["files"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def held_out_rows(gallery: Gallery, held_out: SourceFeatures, k: int) -> list[SheetRow]:
    """A few held-out texts, spread over the data, with the nearest held-out items of the other side.

    A run on views has no texts to ask with: its queries are images, each the first of what it finds.
    """
    if held_out.views:
        images = len(set(held_out.names))
        asked = list(range(images))[:: max(1, images // ROWS)][:ROWS]
        queries = [gallery.caption(item) for item in asked]
        return found_rows(gallery, queries, gallery.left[asked], k=k, among="left", items=range(images))
    among = searched_side(gallery.kinds)
    names, texts = len(set(held_out.names)), len(set(held_out.texts))  # held-out items come first in the gallery
    items, count = (names, texts) if among == "left" else (texts, names)
    asked = list(range(count))[:: max(1, count // ROWS)][:ROWS]
    words, features = (gallery.texts, gallery.right) if among == "left" else (gallery.names, gallery.left)
    return found_rows(gallery, [words[item] for item in asked], features[asked], k=k, among=among, items=range(items))
