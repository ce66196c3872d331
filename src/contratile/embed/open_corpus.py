"""Opens what can be searched: the gallery of a run, or embedded files, with the encoders for queries.

corpus, towers, title, place = open_corpus(Path("runs/icons"))
corpus, towers, title, place = open_corpus(Path("features.npy"), run=Path("runs/moved"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from contratile.data.sample import Indexed
from contratile.embed.corpus import EmbeddedCorpus
from contratile.embed.embed import digest
from contratile.embed.output import SUFFIXES, Output, whole_of
from contratile.embed.record import SUFFIX, Record, record_file
from contratile.embed.run_source import run_source
from contratile.embed.stored import open_stored
from contratile.errors import bad_value
from contratile.models.encoding import best_device
from contratile.models.towers import Towers
from contratile.printable import printable
from contratile.report.corpus import Corpus
from contratile.report.gallery import load_gallery
from contratile.report.gallery_corpus import GalleryCorpus
from contratile.train.checkpoint import step_name, steps
from contratile.train.config import TrainConfig
from contratile.train.config_file import CONFIG
from contratile.train.load import Run, load_run


class OpenedCorpus(NamedTuple):
    """A corpus with the encoders whose features it holds."""

    corpus: Corpus
    towers: Towers
    title: str
    sheet: Path
    """Where a contact sheet goes by default."""


def open_corpus(path: Path, *, run: Path | None = None, pictures: str | None = None) -> OpenedCorpus:
    """Open the gallery of a finished run, or what `contratile embed` wrote. The training data is not needed.

    Args:
        path: Folder of a run; or the name that was given to `contratile embed --out`, or a folder with one such.
        run: Run whose encoders embedded the data, if it is no longer where it was.
        pictures: Data to read the pictures of embedded rows from, named as for `contratile embed`. By default the
            data that was embedded, if this user embedded it.

    Raises:
        ValueError: There is nothing to search, it is damaged, or the run has other weights than those that were used.

    Examples:
        >>> opened = open_corpus(Path("features.npy"))                       # doctest: +SKIP
    """
    out = _embedded_name(path)
    if out is not None:
        return _open_embedded(out, path.is_dir(), run, pictures)
    for name, value in {"run": run, "pictures": pictures}.items():
        if value is not None:
            remedy = "Drop it: a run has its own encoders and pictures."
            bad_value(f"--{name}", expected="embedded features with it", got=f"the run {path}", remedy=remedy)
    if not path.is_dir():
        expected = "the folder of a run, or features that `contratile embed` wrote"
        bad_value("what to search", expected=expected, got=f"nothing at {path}", remedy="Check the path.")
    gallery = load_gallery(path)
    # Its weights need not be the best ones.
    remedy = "It removes older ones as it trains, and writes its gallery again at its end."
    towers = _run_at(path, gallery.step, remedy).towers
    title = printable(path.resolve().name) or "run"
    return OpenedCorpus(GalleryCorpus(gallery), towers.to(best_device()), title, path / "search.png")


def _embedded_name(path: Path) -> Path | None:
    """The `--out` of embedded features, in any form it may be given; None if it is something else."""
    if path.is_dir():
        records = [] if (path / CONFIG).exists() else sorted(path.glob(f"*{SUFFIX}"))
        if len(records) > 1:
            there = ", ".join(record.name.removesuffix(SUFFIX) for record in records[:5])
            remedy = "Name the file of one of them."
            bad_value(f"folder {path}", expected="one set of embedded features", got=there, remedy=remedy)
        if not records:
            return None
        path = records[0]
    name = path.name
    if name.endswith(SUFFIX):
        return path.with_name(name.removesuffix(SUFFIX))
    if path.suffix not in SUFFIXES:
        return None
    return path if record_file(path).exists() else whole_of(path) or path


def _open_embedded(out: Path, folder: bool, run: Path | None, pictures: str | None) -> OpenedCorpus:
    record = Record.read(record_file(out))
    stored = open_stored(Output.of(out, record.sides), record)
    place = Path(record.run) if run is None else run
    if run is None and not (record.run and (place / CONFIG).exists()):
        got = f"none at {printable(record.run)}" if record.run else "none"
        bad_value(f"run that embedded {out}", expected="a folder", got=got, remedy="Say where it is: --run RUN.")
    remedy = "Name a copy of the run that has it with --run, or embed the data again."
    towers, config, _ = _run_at(place, record.step, remedy)
    widths = [getattr(towers, side).width for side in record.sides]
    if digest(towers) != record.weights or set(widths) != {record.width}:
        expected = f"the weights that embedded {out}, of step {record.step}"
        remedy = "Name the run that did it with --run, or embed the data again."
        bad_value(f"run {place}", expected=expected, got="others", remedy=remedy)
    source, remark = None, ""
    if record.kinds[0] == "image" and "left" in record.sides:
        source, remark = _picture_source(record, config, pictures)
    elif pictures is not None:
        remedy = "Drop it: there are none to show."
        bad_value("--pictures", expected="embedded pictures with it", got=record.names[1], remedy=remedy)
    title = printable(out.resolve().parent.name if folder else out.stem) or "features"
    sheet = out.parent / "search.png" if folder else out.with_suffix(".search.png")
    return OpenedCorpus(EmbeddedCorpus(record, stored, source, remark), towers.to(best_device()), title, sheet)


def _run_at(run: Path, step: int, remedy: str) -> Run:
    """Load the weights of a step, which cannot be chosen: features were made with them."""
    folder = run / "checkpoints" / step_name(step)
    if (run / CONFIG).exists() and not folder.exists():
        there = ", ".join(found.name for found in steps(run)) or "none"
        bad_value(f"checkpoint {folder}", expected="a folder", got="none", remedy=f"The run has {there}. {remedy}")
    return load_run(run, step_name(step), choose=False)


def _picture_source(record: Record, config: TrainConfig, named: str | None) -> tuple[Indexed | None, str]:
    """The data to read pictures from, or why there is none.

    A record could name any data of this machine. It is followed only if this user wrote it.
    """
    told = record.data.get("data")
    name = told if named is None and isinstance(told, str) else named or ""
    if not name:
        return None, "the data is not recorded; name it with --pictures"
    if named is None and not record.own:
        return None, f"someone else embedded {printable(name)}; name the data with --pictures"
    if named is None and not _is_here(name):
        return None, f"{printable(name)} is not here; name the data with --pictures"
    given: dict[str, Any] = {"data": name, "streaming": False, "workers": 0}
    columns = record.data.get("columns")
    left, right = columns if isinstance(columns, list) and len(columns) == 2 else ("", "")
    given |= {"left": str(left), "right": str(right)}
    root = record.data.get("root")
    given["root"] = Path(root) if record.own and isinstance(root, str) and root else None
    try:
        source = run_source(config.data, given, split=str(record.data.get("split", "all")))
    except (OSError, ValueError, ImportError) as error:
        if named is not None:
            raise
        return None, printable(str(error))
    if not isinstance(source, Indexed):
        return None, f"those of {printable(name)} cannot be read one by one"
    return source, ""


def _is_here(name: str) -> bool:
    """Whether data is on this machine, so that opening it needs no network."""
    return name == "icons" or Path(name.removeprefix("hf:").partition(":")[0] if "hf:" in name else name).exists()
