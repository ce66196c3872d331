"""The gallery of a run: features, captions and thumbnails, so that `contratile search` does not need the data.

    save_gallery(make_gallery(features, source, step), run)
    gallery = load_gallery(run)

It holds the held-out pairs and, for small data, the training pairs too, marked as such. Repeated images and texts are
stored once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from contratile.data.files import usual_mode, written_whole
from contratile.data.sample import Broken, Indexed, Sample, Source, Stream
from contratile.errors import bad_value
from contratile.models.encoding import SourceFeatures, matches
from contratile.report.corpus import Side
from contratile.report.metric_text import side_names
from contratile.report.sheets import on_white

if TYPE_CHECKING:
    from PIL.Image import Image

GALLERY = "gallery"
EDGE = 96
"""Longer edge of a thumbnail in pixels, as a contact sheet shows it."""

MOST = 20_000
"""Thumbnails that are kept at most, about 4 KB each; further pictures have only their name."""


class Gallery(NamedTuple):
    """Both sides of the pairs that can be searched, each item once."""

    left: Tensor  # [U, D]
    right: Tensor  # [V, D]
    pairs: Tensor  # [P, 2]: left item and right item that belong together
    names: list[str]
    """Names of the left items: paths or keys of pictures, or the texts of a text pair."""

    texts: list[str]
    """The right items."""

    kinds: tuple[str, str]
    """What each side holds: "image" or "text"."""

    sides: tuple[str, str]
    """Names of the sides: image and text, or the columns of a text pair."""

    pictures: list[bytes]
    """Thumbnails of the left items as image files; b"" where there is none."""

    step: int
    """Step of the weights that produced the features."""

    trained: Tensor  # [P]: which pairs are training data; all False if only held-out ones are here

    def caption(self, item: int) -> str:
        """The first text of a left item."""
        return self.texts[int(self.pairs[self.pairs[:, 0] == item, 1][0])]

    def trained_items(self, side: Side) -> list[bool]:
        """For each item of a side, whether it occurs in a training pair."""
        items = self.pairs[:, 0 if side == "left" else 1]
        counts = items[self.trained].bincount(minlength=len(self.names if side == "left" else self.texts))
        found: list[bool] = (counts > 0).tolist()
        return found

    def counts(self) -> str:
        """How many left items there are, and how many of them are training data."""
        trained = sum(self.trained_items("left"))
        split = f" ({trained:,} training, {len(self.names) - trained:,} held out)" if trained else ""
        return f"{len(self.names):,} {self.sides[0]} items{split}"


def make_gallery(
    found: SourceFeatures,
    source: Source,
    step: int,
    training: tuple[SourceFeatures, Source] | None = None,
) -> Gallery:
    """Build a gallery from encoded data. Pictures are read again for their thumbnails.

    Args:
        found: Features of the held-out data.
        source: The held-out data.
        step: Step of the weights that produced the features.
        training: Features of the training data and the data itself, if they are to be searched too.

    Returns:
        The gallery; items of the held-out data come first.
    """
    parts = [(found, source), *([training] if training else [])]
    every = _joined([features for features, _ in parts])
    groups = matches(every)
    known = set(zip(training[0].names, training[0].texts, strict=True)) if training else set()
    rows = groups.left.tolist()
    names, texts = [every.names[row] for row in rows], [every.texts[row] for row in groups.right.tolist()]
    thumbnails: dict[int, bytes] = {}  # by row
    start = 0
    for features, part in parts:
        mine = [row for row in rows[:MOST] if start <= row < start + len(features.keys)]
        wanted = [(every.keys[row], int(every.places[row])) for row in mine]
        thumbnails |= dict(zip(mine, _thumbnails(part, wanted, source.kinds[0]), strict=False))
        start += len(features.keys)
    return Gallery(
        every.left[groups.left],
        every.right[groups.right],
        groups.pairs,
        names,
        texts,
        source.kinds,
        side_names(source),
        [thumbnails[row] for row in rows[:MOST]] if thumbnails else [],
        step,
        torch.tensor([(names[left], texts[right]) in known for left, right in groups.pairs.tolist()]),
    )


def _joined(parts: list[SourceFeatures]) -> SourceFeatures:
    if len(parts) == 1:
        return parts[0]._replace(views=False)  # search groups views by their texts
    return SourceFeatures(
        torch.cat([part.left for part in parts]),
        torch.cat([part.right for part in parts]),
        torch.cat([part.places for part in parts]),
        [key for part in parts for key in part.keys],
        [text for part in parts for text in part.texts],
        [name for part in parts for name in part.names],
        sum(part.broken for part in parts),
    )


# --- thumbnails ---------------------------------------------------------------------------------------------------


def _thumbnails(source: Source, wanted: list[tuple[str, int]], kind: str) -> list[bytes]:
    """A thumbnail file for each (key, place); b"" for samples that can no longer be read."""
    if kind != "image":
        return []
    found = dict.fromkeys((key for key, _ in wanted), b"")
    for sample in _samples(source, wanted):
        if not isinstance(sample.left, str):
            found[sample.key] = thumbnail(sample.left)
    return [found[key] for key, _ in wanted]


def _samples(source: Source, wanted: list[tuple[str, int]]) -> Iterator[Sample]:
    """Read samples again: by index, or from a stream until all have been found."""
    if isinstance(source, Indexed):
        for _, place in wanted:
            try:
                yield source[place]
            except Broken:
                continue
    elif isinstance(source, Stream):
        missing = {key for key, _ in wanted}
        for record, _ in source.records(seed=None, epoch=0, part=0, parts=1):
            try:
                sample = source.sample(record)
            except Broken:
                continue
            if sample.key in missing:
                missing.remove(sample.key)
                yield sample
            if not missing:
                return


def thumbnail(image: Image) -> bytes:
    """Encode a thumbnail: PNG without loss if the picture is small enough, else a scaled JPEG."""
    image, file = on_white(image), io.BytesIO()
    small = max(image.size) <= EDGE
    image.thumbnail((EDGE, EDGE))
    image.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": 88}))
    return file.getvalue()


# --- files --------------------------------------------------------------------------------------------------------


def save_gallery(gallery: Gallery, folder: Path) -> None:
    """Write gallery.safetensors (features in 16 bit, thumbnails) and gallery.json (names and texts).

    The JSON file is removed first and written last: a gallery that has it is complete.
    """
    from safetensors.torch import save_file

    (folder / f"{GALLERY}.json").unlink(missing_ok=True)
    tensors = {
        "left": gallery.left.half().contiguous(),
        "right": gallery.right.half().contiguous(),
        "pairs": gallery.pairs.contiguous(),
        "trained": gallery.trained.contiguous(),
    }
    if gallery.pictures:
        tensors["pictures"] = torch.frombuffer(bytearray(b"".join(gallery.pictures)) or bytearray(1), dtype=torch.uint8)
        tensors["sizes"] = torch.tensor([len(data) for data in gallery.pictures])
    with written_whole(folder / f"{GALLERY}.safetensors") as draft, usual_mode(draft):
        save_file(tensors, draft)
    words = {name: getattr(gallery, name) for name in ("step", "kinds", "sides", "names", "texts")}
    with written_whole(folder / f"{GALLERY}.json") as draft:
        draft.write_text(json.dumps(words), encoding="utf-8")


def load_gallery(folder: Path) -> Gallery:
    """Load the gallery of a finished run.

    Args:
        folder: Folder of the run.

    Returns:
        The gallery. Galleries of earlier versions hold held-out pairs only.

    Raises:
        ValueError: There is no gallery, or it is damaged.

    Examples:
        >>> gallery = load_gallery(Path("runs/icons"))                       # doctest: +SKIP
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, listed = folder / f"{GALLERY}.safetensors", folder / f"{GALLERY}.json"
    if not folder.is_dir():
        remedy = "Give the folder that `contratile train --out` wrote."
        bad_value("run", expected="a folder", got=f"nothing at {folder}", remedy=remedy)
    if not (path.exists() and listed.exists()):
        remedy = "Run its `contratile train` command to the end; it continues where it was stopped or killed."
        bad_value("run", expected=f"a folder with {path.name} and {listed.name}", got=folder, remedy=remedy)
    try:
        words = json.loads(listed.read_text(encoding="utf-8"))
        tensors = load_file(path)
        sizes = tensors["sizes"].tolist() if "sizes" in tensors else []
        data, start, pictures = bytes(tensors["pictures"].numpy()) if sizes else b"", 0, []
        for size in sizes:
            pictures.append(data[start : start + size])
            start += size
        gallery = Gallery(
            tensors["left"].float(),
            tensors["right"].float(),
            tensors["pairs"],
            list(words["names"]),
            list(words["texts"]),
            tuple(words["kinds"]),
            tuple(words["sides"]),
            pictures,
            words["step"],
            tensors.get("trained", torch.zeros(len(tensors["pairs"]), dtype=torch.bool)),
        )
        _check(gallery)
        return gallery
    except PermissionError as error:
        remedy = "Ask its owner for the right to read it."
        bad_value(f"gallery of {folder}", expected="files that can be read", got=str(error), remedy=remedy)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RuntimeError, SafetensorError) as error:
        again = f"contratile train --config {folder / 'config.toml'} --out {folder}"
        remedy = f"It is damaged or from an older version: remove {listed} and run `{again}` to write it again."
        bad_value(
            f"gallery of {folder}", expected="what a finished run writes", got=f"{type(error).__name__}", remedy=remedy
        )


def _check(gallery: Gallery) -> None:
    """Raise ValueError if the parts do not fit together. The folder may come from anyone, so nothing is trusted."""
    sides = ((gallery.left, gallery.names), (gallery.right, gallery.texts))
    sound = isinstance(gallery.step, int) and len(gallery.kinds) == len(gallery.sides) == 2
    sound = sound and all(isinstance(word, str) for word in (*gallery.kinds, *gallery.sides))
    for column, (features, words) in enumerate(sides):
        sound = sound and features.dim() == 2 and len(features) == len(words) > 0
        sound = sound and all(isinstance(word, str) for word in words)
        # Every item is in a pair: a picture without a text would have no caption.
        sound = sound and gallery.pairs.dim() == 2 and gallery.pairs.shape[1] == 2
        sound = sound and set(gallery.pairs[:, column].tolist()) == set(range(len(words)))
    sound = sound and gallery.trained.dtype == torch.bool and gallery.trained.shape == gallery.pairs.shape[:1]
    if not sound:
        raise ValueError("parts that do not fit together")
