"""The losses as functions: each is a few lines on the primitive.

Features are [N, D] and are never normalised here: pass normalised ones where cosines are meant. Values come back
in fp32 (fp64 for fp64 features), gradients in the dtype of what they belong to. Every loss takes

    group        "auto" (the default process group, if one is initialised), None (this process alone), or a group.
                 Over several ranks a loss and its backward are collective: every rank of the group calls both
    reduction    "none" (one value per local row), "sum" of these, or "mean": world_size / N_total times the sum, so
                 that the mean over ranks is the global mean loss, and DDP's average of gradients is its gradient
    backend      "auto", "torch" (tiles) or "dense" (materialises the scores; for comparison)
    tile         rows and columns of a tile; None lets `plan_tiles` choose
    cache_bytes  memory that may be spent on keeping score tiles for the backward pass, which then saves one of
                 four matrix products for each tile kept; the results are the same to the last bit
"""

from collections.abc import Callable

import torch
from torch import Tensor

from contratile.backends import BACKENDS, Backend
from contratile.errors import (
    bad_value,
    check_choice,
    check_count,
    check_features,
    check_labels,
    check_scale,
    check_vector,
)
from contratile.lse import Engine, pair_stats
from contratile.pairs import PairRule
from contratile.reference import REDUCTIONS, Reduction
from contratile.ring import Ring
from contratile.team import Facts, Group, Team


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
    features = {"query": query} if key is None else {"query": query, "key": key}
    call = f"pair_lse rows={rows} cols={cols}"
    engine = _start(call, features, scale, group, backend, tile, cache_bytes)
    stats = pair_stats(query, key, scale, PairRule(), engine, rows=rows, cols=cols)
    return stats.row_lse * stats.unit, stats.col_lse * stats.unit


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

    def check() -> None:
        check_choice("reduction", reduction, REDUCTIONS)
        if len(image) != len(text):
            got = f"{len(image)} and {len(text)}"
            remedy = "Row i of one is the positive of row i of the other; use info_nce for more keys than queries."
            bad_value("image and text", expected="equally many rows", got=got, remedy=remedy)

    features = {"image": image, "text": text}
    engine = _start(f"clip_loss {reduction}", features, scale, group, backend, tile, cache_bytes, check)
    rule = PairRule(labels=torch.arange(len(image), device=image.device))
    row_lse, col_lse, pos, unit = pair_stats(image, text, scale, rule, engine)
    return _reduce(row_lse - pos + (col_lse - pos), unit / 2, reduction, engine.ring)


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

    def check() -> None:
        check_choice("reduction", reduction, REDUCTIONS)
        if labels is not None:
            check_vector("labels", labels, length=len(query), device=query.device)
            if len(labels) and not torch.compiler.is_compiling():  # the compiled operator checks for itself
                check_labels(labels, len(key))
        elif len(key) < len(query):
            remedy = "Without labels query i's positive is key i; pass labels= if queries share keys."
            bad_value("key", expected=f"at least {len(query)} rows", got=len(key), remedy=remedy)

    features = {"query": query, "key": key}
    engine = _start(f"info_nce {reduction}", features, scale, group, backend, tile, cache_bytes, check)
    rule = PairRule(labels=torch.arange(len(query), device=query.device) if labels is None else labels.long())
    row_lse, _, pos, unit = pair_stats(query, key, scale, rule, engine, cols=False)
    return _reduce(row_lse - pos, unit, reduction, engine.ring)


def _start(
    call: str,
    features: dict[str, Tensor],
    scale: Tensor | float,
    group: Group,
    backend: Backend,
    tile: int | None,
    cache_bytes: int,
    check: Callable[[], None] = lambda: None,
) -> Engine:
    """Check the arguments and, over several ranks, that everybody is making the same call."""
    team = Team.of(group)
    try:
        check_features(features, empty=team.size > 1)
        check()
        check_choice("backend", backend, BACKENDS)
        check_count("cache_bytes", cache_bytes, least=0)
        if tile is not None:
            check_count("tile", tile, least=1)
        check_scale(scale)
        if backend == "dense" and team.size > 1:
            remedy = "Use backend='torch', or group=None for this rank's own pairs."
            bad_value("backend", expected="'auto' or 'torch' over several ranks", got="'dense'", remedy=remedy)
    except (ValueError, TypeError) as error:
        team.refuse(error)
        raise
    query, *others = features.values()
    key = others[0] if others else query
    if team.size == 1:
        return Engine(Ring.flat(team, (key.shape[0],), total=query.shape[0]), backend, tile, cache_bytes)
    inputs = {**features, "scale": scale}
    wanting = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
    facts = team.handshake(
        Facts(
            queries=len(query),
            keys=len(key),
            features=query.shape[1],
            dtype=str(query.dtype).removeprefix("torch."),
            device=query.device.type,
            call=call,
            gradient=" ".join(wanting) if torch.is_grad_enabled() and wanting else "none",
        )
    )
    ring = Ring.flat(team, tuple(fact.keys for fact in facts), total=sum(fact.queries for fact in facts))
    return Engine(ring, backend, tile, cache_bytes)


def _reduce(per_row: Tensor, unit: float, reduction: Reduction, ring: Ring) -> Tensor:
    """`unit` times the rows, their sum, or their share of the global mean."""
    if reduction == "none":
        return per_row * unit
    return per_row.sum() * (unit if reduction == "sum" else unit * ring.team.size / ring.total)
