"""The end of a run: its gallery, a contact sheet, the report; and what a finished run can be asked.

finish(config, source, outcome)                     # writes gallery, contact_sheet.png, report.html, finished.json
is_finished(run, step)                              # whether all of it is there
towers, config, step = load_run(run)                # the best checkpoint's weights
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from contratile.data.files import written_whole
from contratile.data.sample import Source
from contratile.engine.plan import plan_tiles
from contratile.errors import bad_value
from contratile.models.towers import Towers, build_towers, check_recipe, load_weights
from contratile.report.gallery import GALLERY, Gallery, Side, found_rows, make_gallery, save_gallery
from contratile.report.html import SheetRow, contact_sheet, png, write_report
from contratile.report.tracking import DENSE_MATRICES, history, size
from contratile.train import checkpoint
from contratile.train.config import CONFIG, TrainConfig, load_config, to_dict
from contratile.train.evaluate import Encoded, chance
from contratile.train.places import absent_towers

if TYPE_CHECKING:
    from contratile.train.loop import Outcome

FINISHED = "finished.json"
"""Written last: the step, and the files that were written for it."""

ROWS, COLUMNS = 8, 8
"""Of the contact sheet."""

TEXTS = 3
"""Of text pairs, what is shown for each query."""


class Written(NamedTuple):
    """The files of a finished run, and what the report says beside the figures."""

    report: Path
    sheet: Path | None
    notes: list[str]


def finish(config: TrainConfig, source: Source, outcome: Outcome) -> Written:
    """Write what is looked at after a run. `source` is the held-out data."""
    run, encoded = config.run.out, outcome.encoded
    assert encoded is not None, "only the main process of a run that was finished has something to write"
    (run / FINISHED).unlink(missing_ok=True)
    gallery = make_gallery(encoded, source, outcome.step)
    save_gallery(gallery, run)
    pictures = gallery.kinds[0] == "image"
    found = held_out_rows(gallery, COLUMNS if pictures else TEXTS)
    sheet = png(contact_sheet(found, columns=COLUMNS)) if pictures else None
    path = None
    if sheet is not None:
        path = run / "contact_sheet.png"
        with written_whole(path) as draft:
            draft.write_bytes(sheet)
    n = config.run.batch
    workspace = plan_tiles(n, n, encoded.left.shape[1]).workspace_bytes
    notes = [
        f"{len(encoded.keys):,} held-out pairs of {source.name}; none of their texts was seen in training."
        if source.name.startswith("icons")
        else f"{len(encoded.keys):,} held-out pairs of {source.name}{left_out(encoded)}.",
        f"Every step compared {n:,} pairs with each other. The loss did it in a workspace of {size(workspace)}; "
        f"a dense loss would have taken {size(DENSE_MATRICES * 4 * n * n)}.",
    ]
    if len(gallery.names) != len(encoded.keys) or len(gallery.texts) != len(encoded.keys):
        counts = [
            f"{len(items):,} of {side}"
            for items, side in zip((gallery.names, gallery.texts), gallery.sides, strict=True)
        ]
        notes.insert(
            1, f"What repeats was counted once ({', '.join(counts)}), and all that belongs to a query as found."
        )
    report = write_report(
        run,
        title=f"{config.towers.towers} on {source.name.partition(' (')[0]}",
        config=to_dict(config),
        history=history(run),
        final=outcome.metrics,
        chance=chance(encoded),
        sheet=sheet or b"",
        found=() if pictures else found,
        notes=notes,
        sides=gallery.sides,
    )
    files = [f"{GALLERY}.safetensors", f"{GALLERY}.json", report.name, *([path.name] if path else [])]
    with written_whole(run / FINISHED) as draft:
        draft.write_text(json.dumps({"step": outcome.step, "files": files}) + "\n", encoding="utf-8")
    return Written(report, path, notes)


def left_out(encoded: Encoded) -> str:
    """How many pairs are missing because they are broken."""
    return f" ({encoded.broken:,} broken ones are left out)" if encoded.broken else ""


def is_finished(run: Path, step: int) -> bool:
    """Whether `finish` has written everything about a run that ended with this step, and it is still there."""
    try:
        told = json.loads((run / FINISHED).read_text(encoding="utf-8"))
        return bool(told["step"] == step and all((run / name).is_file() for name in told["files"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def held_out_rows(gallery: Gallery, k: int) -> list[SheetRow]:
    """A few held-out texts, spread over the data, with what is nearest to them on the other side."""
    # Of text pairs the left side asks, as in `contratile search`.
    among: Side = "left" if gallery.kinds[0] == "image" else "right"
    texts, features = (gallery.texts, gallery.right) if among == "left" else (gallery.names, gallery.left)
    asked = list(range(len(texts)))[:: max(1, len(texts) // ROWS)][:ROWS]
    return found_rows(gallery, [texts[item] for item in asked], features[asked], k=k, among=among)


class Run(NamedTuple):
    """What a run has learned."""

    towers: Towers
    config: TrainConfig
    step: int
    """Of the checkpoint that the weights are from."""


def load_run(run: Path, weights: str = "best", *, allow_pipe: bool = False) -> Run:
    """The towers of a run with the weights of a checkpoint: its best, its last, or that of a step (step-00000100).

    A run without a best one, which was never evaluated, has its last instead. The folder may be anyone's: nothing in it
    is run, and data that it names by a command is refused when it is opened, unless `allow_pipe` says otherwise.
    """
    if not (run / CONFIG).exists():
        remedy = "Give the folder that `contratile train --out` wrote."
        bad_value("run", expected=f"a folder with {CONFIG}", got=run, remedy=remedy)
    config = load_config(run / CONFIG, allow_pipe=allow_pipe)
    folder: Path | None = run / "checkpoints" / weights
    if weights not in ("best", "last") and checkpoint.step_of(Path(weights)) is None:
        bad_value(
            "weights", expected="best, last or step-...", got=repr(weights), remedy="They are in RUN/checkpoints."
        )
    if weights in ("best", "last"):
        folder = (checkpoint.best(run) if weights == "best" else None) or checkpoint.latest(run)
    if folder is None:
        bad_value("run", expected="a checkpoint", got=run, remedy="The run was stopped before its first one.")
    if weights not in ("best", "last") and not folder.exists():
        there = ", ".join(step.name for step in checkpoint.steps(run)) or "none"
        remedy = f"The run has {there}. One that goes on removes older ones; its gallery is made anew at its end."
        bad_value(f"checkpoint {folder}", expected="a folder", got="nothing there", remedy=remedy)
    gone = absent_towers(config.towers.towers)
    if gone:
        remedy = f"Put it back, or write its new place into {run / CONFIG}: towers = ..."
        bad_value("towers of the run", expected=f"a model at {gone}", got="nothing", remedy=remedy)
    state, facts = checkpoint.load(folder)
    check_recipe(facts, run)
    towers = build_towers(config.towers, folder=run, bias=config.loss.loss == "siglip")
    load_weights(towers, state, folder)
    return Run(towers.eval(), config, facts["step"])
