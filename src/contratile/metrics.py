"""Retrieval and zero-shot metrics, computed tile by tile without an N x M matrix of scores.

    retrieval_metrics(image, text)                     # R@1, R@5, R@10, mean and median rank, both directions
    zero_shot_metrics(image, classes, targets)         # top-1, top-5 accuracy, mean per-class recall
    mean_average_precision(image, classes, targets)    # several classes per image
    nearest(query, gallery, 10)                        # scores and indices of the best keys of each query

The rank of a positive is 1 + the number of other keys that score strictly higher. Among keys with exactly the same
score, `ties="first"` ranks the positive first (features that are all equal look perfect), `ties="mean"` takes its mean
rank in random order. If a feature is not finite, every metric is NaN. Scores are plain products: pass normalised
features for cosines. Everything runs on this process alone, without gradients.
"""

from collections.abc import Iterable, Sequence
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
    """Recall and ranks of images for their texts and texts for their images, named as in open_clip. Replaces

        scores = image @ text.T
        found = {"image_to_text": scores, "text_to_image": scores.T}
        ranks = {name: (x > x.diagonal()[:, None]).sum(1) + 1 for name, x in found.items()}
        return {f"{name}_R@{k}": (x <= k).float().mean() for name, x in ranks.items() for k in ks}

    Args:
        image: Features [I, D].
        text: Features [T, D]. Text i belongs to image i unless `image_of_text` or `pairs` is given.
        ks: The values of k for R@k.
        image_of_text: [T] the image of each text, if images have several texts.
        pairs: [P, 2] rows (image, text) that belong together, if texts have several images too.
        ties: "first" ranks the positive before keys of exactly the same score; "mean" takes the mean of their ranks.
        backend: "auto", "torch", "triton" or "dense", as in the losses.
        tile: Rows and columns of a tile.

    Returns:
        R@k, mean and median rank (rounded down, as in open_clip) for both directions; all NaN if a feature is not
        finite. An item with several positives counts by the best of them; items without any are distractors.

    Examples:
        >>> import torch, contratile as ct
        >>> x = torch.eye(16)
        >>> ct.retrieval_metrics(x, x, ks=(1,))["image_to_text_R@1"]
        1.0
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
    """Zero-shot accuracy: the share of images whose class is among the k best class features.

    Args:
        image: Features [N, D].
        classes: Features [C, D], one per class.
        targets: [N] class of each image.
        ks: The values of k.
        ties: As in `retrieval_metrics`.
        backend: "auto", "torch", "triton" or "dense", as in the losses.
        tile: Rows and columns of a tile.

    Returns:
        `zero_shot_top1`, `zero_shot_top5` and so on, and `zero_shot_per_class`: the top-1 accuracy of each class,
        averaged over the classes that occur in `targets` (balanced accuracy). All NaN if a feature is not finite.

    Examples:
        >>> import torch, contratile as ct
        >>> ct.zero_shot_metrics(torch.eye(4), torch.eye(4), torch.tensor([0, 1, 2, 0]), ks=(1,))
        {'zero_shot_top1': 0.75, 'zero_shot_per_class': 0.8333333333333334}
    """
    check_features({"image": image, "classes": classes}, empty=False)
    check_choice("ties", ties, get_args(Ties))
    check_vector("targets", targets, length=len(image), device=image.device)
    check_labels(targets, len(classes), name="targets", rows="classes")
    if not (_finite(image) and _finite(classes)):
        return {name: float("nan") for name in (*(f"zero_shot_top{k}" for k in ks), "zero_shot_per_class")}
    ranks, _ = _ranks(image, classes, targets.long(), cols=False, ties=ties, backend=backend, tile=tile)
    accuracy = {f"zero_shot_top{k}": _share(ranks, k) for k in ks}
    return accuracy | {"zero_shot_per_class": _per_class(ranks, targets.long().cpu())}


@torch.no_grad()
def mean_average_precision(image: Tensor, classes: Tensor, targets: Tensor, *, block: int | None = None) -> float:
    """Mean average precision of images with any number of classes each, as in CLIP_benchmark. Replaces

        order = (image @ classes.T).argsort(0, descending=True)
        truth = targets.gather(0, order).double()                                      # [N, C], by rank
        precision = truth.cumsum(0) / torch.arange(1, len(image) + 1)[:, None]
        return ((precision * truth).sum(0) / truth.sum(0).clamp_min(1)).mean()

    but holds only some columns of the scores at a time. Images with exactly the same score enter together, so that the
    result does not depend on their order.

    Args:
        image: Features [N, D].
        classes: Features [C, D], one per class.
        targets: [N, C] whether an image belongs to a class: bool, or 0 and 1.
        block: Classes to score at once; None picks a number that takes a few MiB.

    Returns:
        The mean over all classes; a class without any image counts as 0. NaN if a feature is not finite.

    Examples:
        >>> import torch, contratile as ct
        >>> ct.mean_average_precision(torch.eye(3), torch.eye(3), torch.eye(3) > 0)
        1.0
    """
    check_features({"image": image, "classes": classes}, empty=False)
    targets = _multi_hot(targets, image, classes)
    if block is not None:
        check_count("block", block, least=1)
    if not (_finite(image) and _finite(classes)):
        return float("nan")
    width = block or max(1, AP_SCORES // len(image))
    precise = torch.promote_types(image.dtype, torch.float32)
    wide = image.to(precise)
    total = 0.0
    for start in range(0, len(classes), width):
        scores = wide @ classes[start : start + width].to(precise).t()
        if not _finite(scores):  # products that overflow have no order
            return float("nan")
        total += _average_precisions(scores, targets[:, start : start + width]).sum().item()
    return total / len(classes)


AP_SCORES = 1 << 21
"""Scores that `mean_average_precision` sorts at once."""


def _average_precisions(scores: Tensor, truth: Tensor) -> Tensor:
    """Average precision of each column: the mean precision at the ranks of its positives."""
    scores, order = scores.sort(0, descending=True)
    truth = truth.gather(0, order).cpu()
    rank = torch.arange(1, len(truth) + 1)[:, None].expand_as(truth)
    ends = torch.ones_like(truth)
    ends[:-1] = (scores[1:] != scores[:-1]).cpu()
    # The rank of the last image with the same score: the next one at which a group of equal scores ends.
    last = rank.where(ends, len(truth)).flip(0).cummin(0).values.flip(0)
    precision = truth.cumsum(0).gather(0, last - 1).double() / last
    return (precision * truth).sum(0) / truth.sum(0).clamp_min(1)


@torch.no_grad()
def nearest(query: Tensor, gallery: Tensor, k: int, *, tile: int = 16384) -> tuple[Tensor, Tensor]:
    """The k best matches of each query in a gallery.

    Args:
        query: Features [N, D].
        gallery: Features [M, D].
        k: Matches per query; at most M are returned.
        tile: Rows of the gallery that are scored at once.

    Returns:
        (scores [N, k] in descending order, indices [N, k] into the gallery). Scores that are not finite count as -inf,
        so that damaged features come last. The order of equal scores is not defined.

    Examples:
        >>> import torch, contratile as ct
        >>> scores, index = ct.nearest(torch.eye(3), torch.eye(3), 1)
        >>> index.flatten()
        tensor([0, 1, 2])
    """
    check_features({"query": query, "gallery": gallery}, empty=True)
    check_features({"gallery": gallery}, empty=False)
    check_count("k", k, least=1)
    check_count("tile", tile, least=1)
    return nearest_of_tiles(query, (gallery[start : start + tile] for start in range(0, len(gallery), tile)), k)


def nearest_of_tiles(query: Tensor, tiles: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """What `nearest` returns, for a gallery whose rows come in parts, for example from a file."""
    scores = query.new_empty(len(query), 0)
    index = torch.empty(len(query), 0, dtype=torch.long, device=query.device)
    start = 0
    for tile in tiles:
        new = query @ tile.t()
        new.masked_fill_(~new.isfinite(), -torch.inf)  # topk would put NaN first
        places = torch.arange(start, start + new.shape[1], device=query.device).expand_as(new)
        scores, best = torch.cat([scores, new], 1).topk(min(k, scores.shape[1] + new.shape[1]), dim=1)
        index = torch.cat([index, places], 1).gather(1, best)
        start += new.shape[1]
    return scores, index


def _pairs(image: Tensor, text: Tensor, image_of_text: Tensor | None, pairs: Tensor | None) -> Tensor:
    """Rows (image, text) that belong together [P, 2], without duplicates."""
    if pairs is not None:
        if image_of_text is not None:
            bad_value("pairs", expected="pairs= or image_of_text=", got="both", remedy="Pass only pairs=.")
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


def _multi_hot(targets: Tensor, image: Tensor, classes: Tensor) -> Tensor:
    """Targets [N, C] as bool."""
    if not isinstance(targets, Tensor):
        remedy = "Pass 1 where an image belongs to a class."
        bad_type("targets", expected="a tensor of shape [N, C]", got=type(targets).__name__, remedy=remedy)
    if tuple(targets.shape) != (len(image), len(classes)):
        expected = f"shape [{len(image)}, {len(classes)}], one row per image and one column per class"
        remedy = "For one class per image use zero_shot_metrics."
        bad_value("targets", expected=expected, got=list(targets.shape), remedy=remedy)
    if targets.device != image.device:
        remedy = f"Move it with targets.to({str(image.device)!r})."
        bad_type("targets", expected=f"device {image.device}", got=targets.device, remedy=remedy)
    found = targets.bool()
    if not bool((targets == found).all()):
        remedy = "Pass 1 where an image belongs to a class."
        bad_value("targets", expected="0 and 1", got="other values", remedy=remedy)
    return found


def _per_class(ranks: Tensor, targets: Tensor) -> float:
    """Top-1 accuracy of each class, averaged over the classes that occur."""
    if bool(ranks.isnan().any()):
        return float("nan")
    count = targets.bincount()
    hits = targets.bincount(weights=(ranks <= 1).double())
    return (hits[count > 0] / count[count > 0]).mean().item()


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
    """Per query (and per key): the product with its positive, and how many products are higher and equal."""
    ring = Ring.flat(ALONE, (len(key),), total=len(query))
    one = torch.ones((), dtype=query.dtype, device=query.device)
    x = Inputs(query.detach(), key.detach(), one, labels=labels)
    return pair_stats(ring, x, Spec(cols=cols, ranks=True, ties=ties == "mean", backend=backend, tile=tile))


def _tied(level: Tensor, owner: Tensor, owners: int) -> Tensor:
    """How many of an owner's positives share the best level."""
    best = level.new_full((owners,), -torch.inf).scatter_reduce_(0, owner, level, "amax")
    return torch.zeros_like(best).scatter_add_(0, owner, (level == best[owner]).to(best.dtype))


def _rank(stats: PairStats, side: SideStats, tied: Tensor) -> Tensor:
    """The rank of the best of `tied` positives. In random order, on average 1 in tied + 1 of the other items with the
    same score comes before the first of them."""
    assert side.higher is not None and stats.row.total is not None
    higher, tied = side.higher.cpu().double(), tied.cpu().double()  # not every device has fp64
    if not _finite(stats.row.total):  # products that overflow have no order
        return higher * torch.nan
    return higher + 1 if side.equal is None else higher + 1 + (side.equal.cpu().double() - tied) / (tied + 1)


def _share(ranks: Tensor, k: int) -> float:
    return torch.where(ranks.isnan(), ranks, (ranks <= k).double()).mean().item()


def _median(ranks: Tensor) -> float:
    """The median, rounded down as in open_clip."""
    return ranks.quantile(0.5).floor().item() if len(ranks) < 1 << 24 else ranks.median().item()
