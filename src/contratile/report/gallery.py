"""The gallery of a run: held-out features and all that is shown of them, so that `contratile search` needs no data.

    save_gallery(make_gallery(encoded, source, step), run)
    gallery = load_gallery(run)
    (row,) = found_rows(gallery, ["arrow left"], features, k=8)          # the nearest images of a text

Of a picture the gallery keeps a thumbnail, of a text the text. What repeats is there once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from contratile.data.files import written_whole
from contratile.data.sample import Broken, Indexed, Sample, Source, Stream
from contratile.errors import bad_value
from contratile.metrics import nearest
from contratile.report.html import SheetRow, flat
from contratile.report.wording import side_names
from contratile.train.evaluate import Encoded, matches

if TYPE_CHECKING:
    from PIL.Image import Image

Side = Literal["left", "right"]
GALLERY = "gallery"
EDGE = 96
"""Pixels of a thumbnail's longer edge: what a contact sheet shows."""

MOST = 20_000
"""Thumbnails that are kept, some 4 KB each; further pictures are known by name only."""


class Gallery(NamedTuple):
    """Both sides of the held-out pairs, each item once."""

    left: Tensor  # [U, D]
    right: Tensor  # [V, D]
    pairs: Tensor  # [P, 2]: which left item and which text belong together
    names: list[str]
    """Of the left items: paths or keys of pictures; of text pairs the texts."""

    texts: list[str]
    """The right items."""

    kinds: tuple[str, str]
    sides: tuple[str, str]
    """What the sides are called: image and text, or the columns of a text pair."""

    pictures: list[bytes]
    """Thumbnails of the left items, as files; empty where there is none."""

    step: int
    """Of the weights that made the features."""

    def caption(self, item: int) -> str:
        """The first text of a left item."""
        return self.texts[int(self.pairs[self.pairs[:, 0] == item, 1][0])]


def make_gallery(found: Encoded, source: Source, step: int) -> Gallery:
    """The gallery of encoded data; its pictures are read again for their thumbnails."""
    groups = matches(found)
    kinds = source.kinds
    shown = groups.left[:MOST].tolist()
    pictures = _thumbnails(source, [(found.keys[row], int(found.places[row])) for row in shown], kinds[0])
    return Gallery(
        found.left[groups.left],
        found.right[groups.right],
        groups.pairs,
        [found.names[row] for row in groups.left.tolist()],
        [found.texts[row] for row in groups.right.tolist()],
        kinds,
        side_names(source),
        pictures,
        step,
    )


def found_rows(
    gallery: Gallery, queries: Sequence[str], features: Tensor, *, k: int, among: Side = "left"
) -> list[SheetRow]:
    """The k nearest items of one side for each query: their pictures and texts, and whether they belong to it."""
    own = gallery.texts if among == "left" else gallery.names  # the side that queries are of
    scores, best = nearest(features, gallery.left if among == "left" else gallery.right, k)
    rows = []
    for query, row, found in zip(queries, scores.tolist(), best.tolist(), strict=True):
        mine = _belonging(gallery, own.index(query), among) if query in own else set()
        if among == "right":
            rows.append(SheetRow(query, [], [gallery.texts[item] for item in found], [x in mine for x in found], row))
        elif gallery.kinds[0] == "text":
            rows.append(SheetRow(query, [], [gallery.names[item] for item in found], [x in mine for x in found], row))
        else:
            captions = [query if item in mine else gallery.caption(item) for item in found]
            images = [_picture(gallery, item) for item in found]
            names = [gallery.names[item] for item in found]
            rows.append(SheetRow(query, images, captions, [x in mine for x in found], row, names))
    return rows


def _belonging(gallery: Gallery, item: int, among: Side) -> set[int]:
    """The items of one side that belong to an item of the other."""
    mine, theirs = (1, 0) if among == "left" else (0, 1)
    return set(gallery.pairs[gallery.pairs[:, mine] == item, theirs].tolist())


def _picture(gallery: Gallery, item: int) -> Image | None:
    """The thumbnail of a left item, if the gallery has one that can be read."""
    from contratile.data.images import decode

    try:
        data = gallery.pictures[item] if item < len(gallery.pictures) else b""
        return decode(data, gallery.names[item]) if data else None
    except Broken:
        return None


# --- thumbnails ---------------------------------------------------------------------------------------------------


def _thumbnails(source: Source, wanted: list[tuple[str, int]], kind: str) -> list[bytes]:
    """For each (key, place) a small picture as a file; b"" for what cannot be read any more."""
    if kind != "image":
        return []
    found = dict.fromkeys((key for key, _ in wanted), b"")
    for sample in _samples(source, wanted):
        if not isinstance(sample.left, str):
            found[sample.key] = _small(sample.left)
    return [found[key] for key, _ in wanted]


def _samples(source: Source, wanted: list[tuple[str, int]]) -> Iterator[Sample]:
    """The samples again: by their places, or out of a stream, which is read until all were there."""
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


def _small(image: Image) -> bytes:
    """A picture of at most EDGE pixels as a file: exact if it was small before, else JPEG."""
    image, file = flat(image), io.BytesIO()
    small = max(image.size) <= EDGE
    image.thumbnail((EDGE, EDGE))
    image.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": 88}))
    return file.getvalue()


# --- files --------------------------------------------------------------------------------------------------------


def save_gallery(gallery: Gallery, folder: Path) -> None:
    """Features in 16 bit and thumbnails in one file; names and texts in another, which goes first and comes last."""
    from safetensors.torch import save_file

    (folder / f"{GALLERY}.json").unlink(missing_ok=True)
    tensors = {
        "left": gallery.left.half().contiguous(),
        "right": gallery.right.half().contiguous(),
        "pairs": gallery.pairs.contiguous(),
    }
    if gallery.pictures:
        tensors["pictures"] = torch.frombuffer(bytearray(b"".join(gallery.pictures)) or bytearray(1), dtype=torch.uint8)
        tensors["sizes"] = torch.tensor([len(data) for data in gallery.pictures])
    with written_whole(folder / f"{GALLERY}.safetensors") as draft:
        save_file(tensors, draft)
    words = {name: getattr(gallery, name) for name in ("step", "kinds", "sides", "names", "texts")}
    with written_whole(folder / f"{GALLERY}.json") as draft:
        draft.write_text(json.dumps(words), encoding="utf-8")


def load_gallery(folder: Path) -> Gallery:
    """What `save_gallery` wrote. A folder without it, or with a damaged one, is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, listed = folder / f"{GALLERY}.safetensors", folder / f"{GALLERY}.json"
    if not folder.is_dir():
        remedy = "Give the folder that `contratile train --out` wrote."
        bad_value("run", expected="a folder", got=f"nothing at {folder}", remedy=remedy)
    if not (path.exists() and listed.exists()):
        remedy = "Run its `contratile train` command to the end; one that was stopped or killed goes on from there."
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
        )
        _check(gallery)
        return gallery
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RuntimeError, SafetensorError) as error:
        again = f"contratile train --config {folder / 'config.toml'} --out {folder}"
        remedy = f"It is damaged or of an older version: remove {listed} and run `{again}`, which writes it anew."
        bad_value(
            f"gallery of {folder}", expected="what a finished run writes", got=f"{type(error).__name__}", remedy=remedy
        )


def _check(gallery: Gallery) -> None:
    """Raise ValueError for parts that do not belong together: whoever made the folder, nothing is taken on trust."""
    sides = ((gallery.left, gallery.names), (gallery.right, gallery.texts))
    sound = isinstance(gallery.step, int) and len(gallery.kinds) == len(gallery.sides) == 2
    sound = sound and all(isinstance(word, str) for word in (*gallery.kinds, *gallery.sides))
    for column, (features, words) in enumerate(sides):
        sound = sound and features.dim() == 2 and len(features) == len(words) > 0
        sound = sound and all(isinstance(word, str) for word in words)
        # Every item belongs to something: a picture without a text has no caption to show.
        sound = sound and gallery.pairs.dim() == 2 and gallery.pairs.shape[1] == 2
        sound = sound and set(gallery.pairs[:, column].tolist()) == set(range(len(words)))
    if not sound:
        raise ValueError("parts that do not belong together")
