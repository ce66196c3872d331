"""The losses as functions: each is a few lines on the primitive.

Features are [N, D] and are never normalised here: pass normalised ones where cosines are meant. Values come back
in fp32 (fp64 for fp64 features), gradients in the dtype of what they belong to. Every loss takes

    group        "auto" (the default process group, if one is initialised), None (this process alone)
    reduction    "mean", "sum" or "none" (one value per row)
    backend      "auto", "torch" (tiles) or "dense" (materialises the scores; for comparison)
    tile         rows and columns of a tile; None lets `plan_tiles` choose
    cache_bytes  memory that may be spent on keeping score tiles for the backward pass, which then saves one of
                 four matrix products for each tile kept; the results are the same to the last bit
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from contratile.backends import Backend
from contratile.errors import bad_type, bad_value, check_choice, check_count, check_features, check_vector
from contratile.lse import pair_stats
from contratile.pairs import PairRule
from contratile.reference import Reduction, reduce

Group = Literal["auto"] | None


def pair_lse(
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float = 1.0,
    *,
    rows: bool = True,
    cols: bool = True,
    group: Group = "auto",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """Row and column log-sum-exps of the scores, natural logarithm, without the scores. Replaces

        scores = scale * query @ key.T
        return scores.logsumexp(1), scores.logsumexp(0)

    A side that is not asked for is empty. `key=None` stands for the queries themselves, at half the work.
    """
    _check(group, backend, tile, cache_bytes, scale, query=query, key=query if key is None else key)
    stats = pair_stats(
        query, key, scale, PairRule(), rows=rows, cols=cols, backend=backend, tile=tile, cache_bytes=cache_bytes
    )
    return stats.row_lse, stats.col_lse


def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
) -> Tensor:
    """The symmetric contrastive loss of CLIP over pairs (image_i, text_i). Replaces

    logits = scale * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    """
    _check(group, backend, tile, cache_bytes, scale, image=image, text=text)
    check_choice("reduction", reduction, Reduction)
    if len(image) != len(text):
        remedy = "Row i of one is the positive of row i of the other; use info_nce for more keys than queries."
        bad_value("image and text", expected="equally many rows", got=f"{len(image)} and {len(text)}", remedy=remedy)
    rule = PairRule(labels=torch.arange(len(image), device=image.device))
    row_lse, col_lse, pos = pair_stats(image, text, scale, rule, backend=backend, tile=tile, cache_bytes=cache_bytes)
    return reduce((row_lse - pos + col_lse - pos) / 2, reduction)


def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
) -> Tensor:
    """InfoNCE of queries against keys, of which there may be more than queries. Replaces

        return F.cross_entropy(scale * query @ key.T, labels)

    `labels[i]` is the row of `key` that is query i's positive; by default it is row i.
    """
    _check(group, backend, tile, cache_bytes, scale, query=query, key=key)
    check_choice("reduction", reduction, Reduction)
    if labels is not None:
        check_vector("labels", labels, length=len(query), device=query.device)
        labels = labels.long()
    elif len(key) < len(query):
        remedy = "Without labels query i's positive is key i; pass labels= if queries share keys."
        bad_value("key", expected=f"at least {len(query)} rows", got=len(key), remedy=remedy)
    else:
        labels = torch.arange(len(query), device=query.device)
    row_lse, _, pos = pair_stats(
        query, key, scale, PairRule(labels=labels), cols=False, backend=backend, tile=tile, cache_bytes=cache_bytes
    )
    return reduce(row_lse - pos, reduction)


def _check(
    group: Group,
    backend: Backend,
    tile: int | None,
    cache_bytes: int,
    scale: Tensor | float,
    **features: Tensor,
) -> None:
    check_features(**features)
    check_choice("backend", backend, Backend)
    check_count("cache_bytes", cache_bytes, least=0)
    if tile is not None:
        check_count("tile", tile, least=1)
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.is_floating_point():
            got = f"{scale.dtype} of shape {list(scale.shape)}"
            bad_value("scale", expected="a float or a 0-d float tensor", got=got, remedy="One scale serves all pairs.")
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        remedy = "Pass a number, or a tensor if it is learned."
        bad_type("scale", expected="a float or a 0-d float tensor", got=type(scale).__name__, remedy=remedy)
    if group not in ("auto", None):
        bad_value("group", expected='"auto" or None', got=repr(group), remedy="Pass None for this process alone.")
    if group == "auto" and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        remedy = "Pass group=None for a loss over this rank's own pairs."
        bad_value("group", expected="one process", got=f"{dist.get_world_size()} ranks", remedy=remedy)
