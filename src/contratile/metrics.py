"""Retrieval and zero-shot metrics from tiles: never an N x M matrix of scores.

    retrieval_metrics(image, text)                     # R@1, R@5, R@10, mean and median rank, both directions
    zero_shot_metrics(image, classes, targets)         # top-1, top-5 accuracy
    nearest(query, gallery, 10)                        # scores and indices of the best keys of each query

The rank of a positive is 1 + the number of other keys that score strictly higher. Of keys that score exactly the same,
`ties="first"` puts the positive before all others, so that features that are all equal look perfect; `ties="mean"`
takes its mean rank if equals come in random order. Features that are not finite have no ranks: every metric is NaN.
Features are compared by their products: pass normalised ones where cosines are meant. Everything runs on this process
alone, without gradients.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.backends import Backend
from contratile.engine.spec import Inputs, PairStats, SideStats, Spec
from contratile.errors import bad_type, bad_value, check_choice, check_count, check_features, check_labels, check_vector
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE

Ties = Literal["first", "mean"]


def retrieval_metrics(
    image: Tensor,
    text: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    *,
    image_of_text: Tensor | None = None,
    pairs: Tensor | None = None,
    ties: Ties = "first",
    backend: Backend = "auto",
    tile: int | None = None,
) -> dict[str, float]:
    """How well texts find their images and images their texts, under the names that open_clip uses. Replaces

        scores = image @ text.T
        found = {"image_to_text": scores, "text_to_image": scores.T}
        ranks = {name: (x > x.diagonal()[:, None]).sum(1) + 1 for name, x in found.items()}
        return {f"{name}_R@{k}": (x <= k).float().mean() for name, x in ranks.items() for k in ks}

    Args:
        image: features [I, D].
        text: features [T, D]. Text i belongs to image i unless one of the next two says otherwise.
        ks: the k of R@k.
        image_of_text: [T], the image that each text belongs to: several captions of an image.
        pairs: [P, 2] of (image row, text row) that belong together, where texts have several images too.
        ties: "first" ranks the positive before keys that score exactly the same; "mean" takes the mean of their ranks.
        backend, tile: as in the losses.

    Returns:
        R@k, mean and median rank (rounded down, as open_clip does) of both directions; NaN, all of them, if a feature
        is not finite. What belongs to several is found by the best of them; what belongs to none is only there to be
        confused with.
    """
    check_features({"image": image, "text": text}, empty=False)
    check_choice("ties", ties, get_args(Ties))
    pairs = _pairs(image, text, image_of_text, pairs)
    names = ("mean_rank", "median_rank", *(f"R@{k}" for k in ks))
    if not (_finite(image) and _finite(text)):
        return {f"{way}_{name}": float("nan") for way in ("image_to_text", "text_to_image") for name in names}
    how: dict[str, Any] = {"ties": ties, "backend": backend, "tile": tile}
    images, texts = pairs.unbind(1)
    if len(texts) == len(text) and bool((texts.bincount(minlength=len(text)) == 1).all()):
        of_text = torch.empty_like(texts).scatter_(0, texts, images)
        text_ranks, image_ranks = _ranks(text, image, of_text, cols=True, **how)
        image_ranks = image_ranks[images.bincount(minlength=len(image)).cpu() > 0]
    else:
        text_ranks, image_ranks = (
            _best_ranks(text, image, texts, images, how),
            _best_ranks(image, text, images, texts, how),
        )
    metrics: dict[str, float] = {}
    for way, ranks in (("image_to_text", image_ranks), ("text_to_image", text_ranks)):
        values = ranks.mean().item(), _median(ranks), *(_share(ranks, k) for k in ks)
        metrics |= {f"{way}_{name}": value for name, value in zip(names, values, strict=True)}
    return metrics


def zero_shot_metrics(
    image: Tensor,
    classes: Tensor,
    targets: Tensor,
    ks: Sequence[int] = (1, 5),
    *,
    ties: Ties = "first",
    backend: Backend = "auto",
    tile: int | None = None,
) -> dict[str, float]:
    """Share of the images [N, D] whose class is among the k best of the class features [C, D]; `targets` are [N].

    NaN if a feature is not finite; `ties` as in `retrieval_metrics`.
    """
    check_features({"image": image, "classes": classes}, empty=False)
    check_choice("ties", ties, get_args(Ties))
    check_vector("targets", targets, length=len(image), device=image.device)
    check_labels(targets, len(classes), name="targets", rows="classes")
    if not (_finite(image) and _finite(classes)):
        return {f"zero_shot_top{k}": float("nan") for k in ks}
    ranks, _ = _ranks(image, classes, targets.long(), cols=False, ties=ties, backend=backend, tile=tile)
    return {f"zero_shot_top{k}": _share(ranks, k) for k in ks}


@torch.no_grad()
def nearest(query: Tensor, gallery: Tensor, k: int, *, tile: int = 16384) -> tuple[Tensor, Tensor]:
    """The k best scores of each query, falling, and where in the gallery they are: two [N, k], k at most its size."""
    check_features({"query": query, "gallery": gallery}, empty=False)
    check_count("k", k, least=1)
    k = min(k, len(gallery))
    scores = query.new_empty(len(query), 0)
    index = torch.empty(len(query), 0, dtype=torch.long, device=query.device)
    for start in range(0, len(gallery), tile):
        new = query @ gallery[start : start + tile].t()
        places = torch.arange(start, start + new.shape[1], device=query.device).expand_as(new)
        scores, best = torch.cat([scores, new], 1).topk(min(k, scores.shape[1] + new.shape[1]), dim=1)
        index = torch.cat([index, places], 1).gather(1, best)
    return scores, index


def _pairs(image: Tensor, text: Tensor, image_of_text: Tensor | None, pairs: Tensor | None) -> Tensor:
    """Which image and which text belong together [P, 2], each pair once."""
    if pairs is not None:
        if image_of_text is not None:
            bad_value("pairs", expected="pairs= or image_of_text=", got="both", remedy="pairs= says everything.")
        if not isinstance(pairs, Tensor) or pairs.dim() != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
            found = list(pairs.shape) if isinstance(pairs, Tensor) else type(pairs).__name__
            remedy = "Pass one (image row, text row) for each pair that belongs together."
            bad_type("pairs", expected="a tensor of shape [P, 2]", got=found, remedy=remedy)
        for name, column, features in (("pairs[:, 0]", pairs[:, 0], image), ("pairs[:, 1]", pairs[:, 1], text)):
            check_vector(name, column, length=len(pairs), device=image.device)
            check_labels(column, len(features), name=name, rows="image" if features is image else "text")
        return torch.unique(pairs.long(), dim=0)  # type: ignore[no-any-return]
    if image_of_text is None:
        if len(image) != len(text):
            remedy = "Pass image_of_text=, the index of each text's image."
            got = f"{len(image)} and {len(text)}"
            bad_value("image and text", expected="equally many rows", got=got, remedy=remedy)
        image_of_text = torch.arange(len(text), device=text.device)
    check_vector("image_of_text", image_of_text, length=len(text), device=text.device)
    check_labels(image_of_text, len(image), name="image_of_text", rows="image")
    return torch.stack([image_of_text.long(), torch.arange(len(text), device=text.device)], 1)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


@torch.no_grad()
def _ranks(
    query: Tensor, key: Tensor, labels: Tensor, *, cols: bool, ties: Ties, backend: Backend, tile: int | None
) -> tuple[Tensor, Tensor]:
    """The ranks of the queries' positives among the keys, and of the keys' best positives among the queries."""
    stats = _counts(query, key, labels, cols=cols, ties=ties, backend=backend, tile=tile)
    assert stats.level is not None
    row = _rank(stats, stats.row, torch.ones_like(stats.level))
    if not cols:
        return row, row[:0]
    return row, _rank(stats, stats.col, _tied(stats.level, labels, len(key)))


@torch.no_grad()
def _best_ranks(query: Tensor, key: Tensor, queries: Tensor, keys: Tensor, how: dict[str, Any]) -> Tensor:
    """The rank of each query's best positive, for pairs of (query, key) that belong together: a row for each pair."""
    stats = _counts(query[queries], key, keys, cols=False, **how)
    level = stats.level
    assert level is not None
    tied = _tied(level, queries, len(query))
    best = level.new_full((len(query),), -torch.inf).scatter_reduce_(0, queries, level, "amax")
    ranks = _rank(stats, stats.row, tied[queries])
    found = (level == best[queries]).cpu()
    # All pairs of a query that share the best level have the same rank.
    of_query = ranks.new_full((len(query),), torch.nan).scatter_(0, queries.cpu()[found], ranks[found])
    return of_query[torch.bincount(queries.cpu(), minlength=len(query)) > 0]


def _counts(
    query: Tensor, key: Tensor, labels: Tensor, *, cols: bool, ties: Ties, backend: Backend, tile: int | None
) -> PairStats:
    """For each query: the product with its positive, how many keys lie above and at it; for each key likewise."""
    ring = Ring.flat(ALONE, (len(key),), total=len(query))
    one = torch.ones((), dtype=query.dtype, device=query.device)
    x = Inputs(query.detach(), key.detach(), one, labels=labels)
    return pair_stats(ring, x, Spec(cols=cols, ranks=True, ties=ties == "mean", backend=backend, tile=tile))


def _tied(level: Tensor, owner: Tensor, owners: int) -> Tensor:
    """How many of an owner's positives share the best level."""
    best = level.new_full((owners,), -torch.inf).scatter_reduce_(0, owner, level, "amax")
    return torch.zeros_like(best).scatter_add_(0, owner, (level == best[owner]).to(best.dtype))


def _rank(stats: PairStats, side: SideStats, tied: Tensor) -> Tensor:
    """The rank of the best of `tied` positives. In random order the first of them stands, on average, behind one in
    tied + 1 of the others that score the same."""
    assert side.higher is not None and stats.row.total is not None
    higher, tied = side.higher.cpu().double(), tied.cpu().double()  # not every device has fp64
    if not _finite(stats.row.total):  # products that overflow have no order
        return higher * torch.nan
    return higher + 1 if side.equal is None else higher + 1 + (side.equal.cpu().double() - tied) / (tied + 1)


def _share(ranks: Tensor, k: int) -> float:
    return torch.where(ranks.isnan(), ranks, (ranks <= k).double()).mean().item()


def _median(ranks: Tensor) -> float:
    """The lower half-way rank, as open_clip rounds it."""
    return ranks.quantile(0.5).floor().item() if len(ranks) < 1 << 24 else ranks.median().item()
