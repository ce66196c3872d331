"""Search the gallery of a run for texts.

gallery = load_gallery(run)
(row,) = search(load_run(run, step_name(gallery.step)).towers, gallery, ["battery charging"])
row.captions, row.scores
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contratile.metrics import nearest
from contratile.models.encoding import to_device
from contratile.report.corpus import Side, searched_side
from contratile.report.gallery import Gallery
from contratile.report.gallery_corpus import found_rows
from contratile.report.sheets import SheetRow

if TYPE_CHECKING:
    from contratile.models.towers import Tower, Towers


def search(
    towers: Towers, gallery: Gallery, queries: Sequence[str], k: int = 8, among: Side | None = None
) -> list[SheetRow]:
    """Search a gallery for texts.

    Args:
        towers: The encoders whose features the gallery holds.
        gallery: Where to search, from `load_gallery`.
        queries: The texts.
        k: Results per query.
        among: The side that is searched. By default the images; for text pairs the right side.

    Returns:
        For each query what was found, best first: captions, names, pictures, scores, and whether it is training data.

    Examples:
        >>> run = Path("runs/icons")                                               # doctest: +SKIP
        >>> gallery = load_gallery(run)                                            # doctest: +SKIP
        >>> towers = load_run(run, f"step-{gallery.step:08d}").towers              # doctest: +SKIP
        >>> search(towers, gallery, ["battery charging"])[0].captions              # doctest: +SKIP
    """
    if not queries:
        return []
    among = among or searched_side(gallery.kinds)
    features = encode_queries(towers.right if among == "left" else towers.left, list(queries))
    return found_rows(gallery, queries, features, k=k, among=among)


@torch.no_grad()
def encode_queries(tower: Tower, queries: list[Any]) -> Tensor:
    """Encode texts, or pictures, with one tower in evaluation mode: features on the CPU."""
    was_training = tower.training
    tower.eval()
    try:
        device = next(tower.parameters()).device
        return tower(to_device(tower.prepare(queries), device)).float().cpu()  # type: ignore[no-any-return]
    finally:
        tower.train(was_training)


def example_query(gallery: Gallery) -> str:
    """A text to try: the shortest held-out one of two to four words that finds its own item first, if there is one."""
    among = searched_side(gallery.kinds)
    words, features = (gallery.texts, gallery.right) if among == "left" else (gallery.names, gallery.left)
    trained = gallery.trained_items("right" if among == "left" else "left")
    asked = [item for item, text in enumerate(words) if not trained[item] and 1 <= text.count(" ") <= 3]
    if not asked:
        return words[0]
    _, best = nearest(features[asked], gallery.left if among == "left" else gallery.right, 1)
    query, found = (1, 0) if among == "left" else (0, 1)
    pairs = {(pair[query], pair[found]) for pair in gallery.pairs.tolist()}
    right = [words[item] for item, first in zip(asked, best[:, 0].tolist(), strict=True) if (item, first) in pairs]
    return min(right, key=len, default=words[asked[0]])
