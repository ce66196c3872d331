"""The losses as functions: each is a few lines on the primitive.

Features are [N, D] and are never normalised here: pass normalised ones where cosines are meant. Values come back
in fp32 (fp64 for fp64 features), also for 16-bit features, of which PyTorch's own losses come back in 16 bits;
gradients in the dtype of what they belong to. Every loss takes

    group        "auto" (the default process group, if one is initialised), None (this process alone), or a group.
                 Over several ranks a loss and its backward are collective: every rank of the group calls both
    reduction    "none" (one value per local row), "sum" of these, or "mean": world_size / N_total times the sum, so
                 that the mean over ranks is the global mean loss, and DDP's average of gradients is its gradient
    backend      "auto", "torch" (tiles), "triton" (kernels, on CUDA and ROCm) or "dense" (materialises the scores; for
                 comparison). "auto" is "triton" where that runs and covers the call, else "torch"
    precision    of products of fp32 features where the hardware has TF32: "ieee", "tf32x3" (kernels; else as "ieee") or
                 "tf32". None follows `torch.get_float32_matmul_precision()`: "highest" is "ieee", the others "tf32"
    tile         rows and columns of a tile; None lets `plan_tiles` choose
    cache_bytes  memory that may be spent on keeping score tiles for the backward pass, which then saves one of
                 four matrix products for each tile kept; the results are the same to the last bit

`clip_loss` and `info_nce` also take

    ids              whole numbers, one per pair, or (query_ids, key_ids): keys of a query's id are no negatives of it
                     (duplicates, several captions of one image); its positive stays
    extra_keys       [E, D] more negatives for all queries: a queue, mined ones. Each rank brings its own, and all
                     queries of all ranks meet them; `extra_ids` [E] compares with the ids of queries
    hard_negatives   [N, H, D] negatives of each query's own; `hard_mask` [N, H] is False where one is padding
    margin           a negative more similar than the positive less this margin (before the scale) is taken for a false
                     one and dropped
    label_smoothing  this share of the target is spread over all keys that count, the positive included
    weights          [N] of pairs: the mean is sum(w * loss) / sum(w) over all ranks
    return_stats     (loss, `BatchStats`) instead of the loss

which cost nothing where they are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from contratile.engine.autograd import Engine, pair_stats
from contratile.engine.backends import BACKENDS, Backend, registry
from contratile.engine.backends.precision import PRECISIONS, Precision
from contratile.engine.spec import Inputs, Task
from contratile.errors import (
    bad_value,
    check_choice,
    check_count,
    check_features,
    check_labels,
    check_pairs,
    check_scale,
    check_temperature,
    check_transform,
    check_vector,
)
from contratile.keywords import known_keywords
from contratile.losses.cross_entropy import (
    BatchStats,
    Ids,
    Options,
    Tally,
    as_tensor,
    batch_stats,
    class_losses,
    cross_entropies,
    lse_above,
    sums_over,
)
from contratile.losses.normalized import look_once
from contratile.reference import REDUCTIONS, Reduction
from contratile.ring.ring import Ring
from contratile.ring.team import Facts, Group, Team

if TYPE_CHECKING:
    from typing_extensions import Unpack


class How(NamedTuple):
    """The keywords of every loss."""

    group: Group
    reduction: Reduction
    backend: Backend
    tile: int | None
    cache_bytes: int
    precision: Precision | None


class Keywords(TypedDict, total=False):
    """The same, as type checkers see them."""

    group: Group
    reduction: Reduction
    backend: Backend
    tile: int | None
    cache_bytes: int
    precision: Precision | None


class PairKeywords(Keywords, total=False):
    """What `clip_loss` and `info_nce` take."""

    ids: Ids | None
    extra_keys: Tensor | None
    extra_ids: Tensor | None
    hard_negatives: Tensor | None
    hard_mask: Tensor | None
    margin: float | None
    label_smoothing: float
    weights: Tensor | None


@known_keywords
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
    precision: Precision | None = None,
) -> tuple[Tensor, Tensor]:
    """Row and column log-sum-exps of the scores, natural logarithm, without the scores. Replaces

        scores = scale * query @ key.T
        return scores.logsumexp(1), scores.logsumexp(0)

    A side that is not asked for is empty. `key=None` stands for the queries themselves, at half the work.
    """
    features = {"query": query} if key is None else {"query": query, "key": key}
    how = How(group, "none", backend, tile, cache_bytes, precision)
    engine = _start(f"pair_lse rows={rows} cols={cols}", features, {"scale": scale}, how)
    results, unit = pair_stats(Inputs(query, key, as_tensor(scale, query)), Task(rows=rows, cols=cols), engine)
    row, col = (results[side] * unit if side in results else query.new_empty(0) for side in ("row", "col"))
    return row, col


@overload
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    return_stats: Literal[False] = False,
    **keywords: Unpack[PairKeywords],
) -> Tensor: ...
@overload
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    return_stats: Literal[True],
    **keywords: Unpack[PairKeywords],
) -> tuple[Tensor, BatchStats]: ...
@known_keywords
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    ids: Ids | None = None,
    extra_keys: Tensor | None = None,
    extra_ids: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    hard_mask: Tensor | None = None,
    margin: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    return_stats: bool = False,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, BatchStats]:
    """The symmetric contrastive loss of CLIP over pairs (image_i, text_i). Replaces

        logits = scale * image @ text.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    Extra keys and hard negatives are texts: images are their queries.
    """
    negatives = extra_keys, extra_ids, hard_negatives, hard_mask
    options = Options(ids, *negatives, margin, label_smoothing, weights, return_stats)

    def check() -> None:
        check_pairs("image and text", image, text)
        options.check(image, text, scale)

    features = {"image": image, "text": text}
    how = How(group, reduction, backend, tile, cache_bytes, precision)
    engine = _start("clip_loss", features, {"scale": scale}, how, check, options)
    labels = torch.arange(len(image), device=image.device)
    losses = cross_entropies(image, text, scale, labels, options, engine, cols=True)
    loss = _reduce(losses.per_pair, losses.unit / 2, reduction, engine.ring, weights)
    return loss if losses.stats is None else (loss, losses.stats)


@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    return_stats: Literal[False] = False,
    **keywords: Unpack[PairKeywords],
) -> Tensor: ...
@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    return_stats: Literal[True],
    **keywords: Unpack[PairKeywords],
) -> tuple[Tensor, BatchStats]: ...
@known_keywords
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    ids: Ids | None = None,
    extra_keys: Tensor | None = None,
    extra_ids: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    hard_mask: Tensor | None = None,
    margin: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    return_stats: bool = False,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, BatchStats]:
    """InfoNCE of queries against keys, of which there may be more than queries. Replaces

        return F.cross_entropy(scale * query @ key.T, labels)

    `labels[i]` is the row of `key` that is query i's positive; by default it is row i.
    """
    negatives = extra_keys, extra_ids, hard_negatives, hard_mask
    options = Options(ids, *negatives, margin, label_smoothing, weights, return_stats)

    def check() -> None:
        if labels is not None:
            check_vector("labels", labels, length=len(query), device=query.device)
            if len(labels) and not torch.compiler.is_compiling():  # the compiled operator checks for itself
                check_labels(labels.long(), len(key))
        elif len(key) < len(query):
            remedy = "Without labels query i's positive is key i; pass labels= if queries share keys."
            bad_value("key", expected=f"at least {len(query)} rows", got=len(key), remedy=remedy)
        options.check(query, key, scale)

    how = How(group, reduction, backend, tile, cache_bytes, precision)
    features = {"query": query, "key": key}
    engine = _start("info_nce", features, {"scale": scale}, how, check, options)
    labels = torch.arange(len(query), device=query.device) if labels is None else labels.long()
    losses = cross_entropies(query, key, scale, labels, options, engine, cols=False)
    loss = _reduce(losses.per_pair, losses.unit, reduction, engine.ring, weights)
    return loss if losses.stats is None else (loss, losses.stats)


@overload
def nt_xent(
    z1: Tensor,
    z2: Tensor,
    temperature: Tensor | float = 0.5,
    *,
    return_stats: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> Tensor: ...
@overload
def nt_xent(
    z1: Tensor,
    z2: Tensor,
    temperature: Tensor | float = 0.5,
    *,
    return_stats: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, BatchStats]: ...
@known_keywords
def nt_xent(
    z1: Tensor,
    z2: Tensor,
    temperature: Tensor | float = 0.5,
    *,
    return_stats: bool = False,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, BatchStats]:
    """SimCLR's loss of two views of each example: every view against all others. Replaces

        z = torch.cat([z1, z2])
        scores = (z @ z.T / temperature).fill_diagonal_(-inf)
        return F.cross_entropy(scores, torch.arange(2 * n).roll(n))

    Scores are symmetric: on one process only the upper triangle of tiles is computed. The mean is over all 2N views,
    and `reduction="none"` gives those of z1, then those of z2.
    """

    def check() -> None:
        check_pairs("z1 and z2", z1, z2)
        check_temperature(temperature)

    how = How(group, reduction, backend, tile, cache_bytes, precision)
    engine = _start("nt_xent", {"z1": z1, "z2": z2}, {"temperature": temperature}, how, check, views=2)
    z = torch.cat([z1, z2])
    labels = torch.arange(len(z), device=z.device).roll(len(z1))
    x = Inputs(z, None, 1 / as_tensor(temperature, z), labels=labels)
    task = Task(cols=False, exclude_self=True, ranks=return_stats)
    results, unit = pair_stats(*(sums_over(x, task) if return_stats else (x, task)), engine)
    above = lse_above(results["pos"], results)
    loss = _reduce(above, unit, reduction, engine.ring)
    if not return_stats:
        return loss
    rows = Tally(above, results["row_sums"], results["row_counts"], results["row_higher"])
    return loss, batch_stats(rows, None, results["pos"], unit, engine)


@known_keywords
def sup_con(
    z: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 0.1,
    *,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
) -> Tensor:
    """The supervised contrastive loss: all others of an anchor's label are its positives. Replaces

        scores = z @ z.T / temperature
        log_prob = scores - scores.clone().fill_diagonal_(-inf).logsumexp(1, keepdim=True)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        return -((log_prob * positive).sum(1) / positive.sum(1))[positive.any(1)].mean()

    An anchor without a positive is 0 and is not counted in the mean.

    SupContrast's `SupConLoss(temperature, contrast_mode="all", base_temperature)` of `features` [B, V, D] is

        z = torch.cat(features.unbind(1))
        loss = temperature / base_temperature * sup_con(z, labels.repeat(V), temperature, reduction="sum") / len(z)

    as it multiplies by `temperature / base_temperature` (by default 0.07 both) and takes the mean over all anchors: the
    same mean as here whenever each has a positive, as with two views. `contrast_mode="one"`, with anchors of the first
    view only, is the mean of the first B values of `reduction="none"`, times the same factor.
    """

    def check() -> None:
        check_vector("labels", labels, length=len(z), device=z.device)
        check_temperature(temperature)

    how = How(group, reduction, backend, tile, cache_bytes, precision)
    engine = _start("sup_con", {"z": z}, {"temperature": temperature}, how, check)
    classes = labels.long()
    x = Inputs(z, None, 1 / as_tensor(temperature, z), query_classes=classes, key_classes=classes)
    rows, count = class_losses(x, engine, exclude_self=True)
    if reduction != "mean":
        return _reduce(rows, 1.0, reduction, engine.ring)
    team = engine.ring.team
    return rows.sum() * (team.size / team.sum((count > 0).sum().to(rows.dtype)).clamp(min=1))


@overload
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    return_stats: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> Tensor: ...
@overload
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    return_stats: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, BatchStats]: ...
@known_keywords
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    return_stats: bool = False,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, BatchStats]:
    """The sigmoid loss of SigLIP, scaled as open_clip's. Replaces

    logits = scale * image @ text.T + bias
    return -F.logsigmoid((2 * torch.eye(n) - 1) * logits).sum() / n
    """

    def check() -> None:
        check_pairs("image and text", image, text)
        check_scale(bias, "bias")

    how = How(group, reduction, backend, tile, cache_bytes, precision)
    numbers = {"scale": scale, "bias": bias}
    engine = _start("siglip_loss", {"image": image, "text": text}, numbers, how, check)
    labels = torch.arange(len(image), device=image.device)
    shift = as_tensor(bias, image)
    x = Inputs(image, text, as_tensor(scale, image), shift, labels=labels)
    task = Task(reduce="softplus", cols=return_stats, ranks=return_stats)
    results, unit = pair_stats(*(sums_over(x, task) if return_stats else (x, task)), engine)
    loss = _reduce(results["row"], unit, reduction, engine.ring)
    if not return_stats:
        return loss
    number = results["row_counts"]
    rows = Tally(results["row"], results["row_sums"] + number * shift, number, results["row_higher"])
    cols = Tally(results["col"], None, None, results["col_higher"])
    return loss, batch_stats(rows, cols, results["pos"], unit, engine)


def _start(
    call: str,
    features: dict[str, Tensor],
    numbers: dict[str, Tensor | float],
    how: How,
    check: Callable[[], None] = lambda: None,
    options: Options | None = None,
    *,
    views: int = 1,
) -> Engine:
    """Check the arguments and, over several ranks, that everybody is making the same call.

    A loss that takes its features together as one set of `views` per row has so many times their rows.
    """
    group, reduction, backend, tile, cache_bytes, precision = how
    team = Team.of(group)
    try:
        more = () if options is None else (options.extra_keys, options.hard_negatives)
        check_transform(call.split()[0], backend, (*features.values(), *numbers.values(), *more))
        check_features(features, empty=team.size > 1)
        check_choice("reduction", reduction, REDUCTIONS)
        for name, number in numbers.items():
            check_scale(number, name)
        check()
        check_choice("backend", backend, BACKENDS)
        check_count("cache_bytes", cache_bytes, least=0)
        if precision is not None:
            check_choice("precision", precision, PRECISIONS)
        if tile is not None:
            check_count("tile", tile, least=1)
        if backend == "dense" and team.size > 1:
            remedy = "Use backend='auto', or group=None for this rank's own pairs."
            bad_value(
                "backend", expected="'auto', 'torch' or 'triton' over several ranks", got="'dense'", remedy=remedy
            )
        if not torch.compiler.is_compiling():  # the compiled operator finds out for itself
            registry.require(backend, next(iter(features.values())).device)
        if not call.startswith("pair_lse"):  # which makes no claim about what its scores are
            look_once(call, tuple(features.values()), numbers)
    except Exception as error:  # whatever it is, the other ranks are not left waiting
        team.refuse(error)
        raise
    query, *others = features.values()
    key = others[0] if others and views == 1 else query
    extra = None if options is None else options.extra_keys
    mine = views * query.shape[0], views * key.shape[0], 0 if extra is None else extra.shape[0]
    sizes = [mine]
    if team.size > 1:
        inputs = {**features, "extra_keys": extra, **numbers}
        wanting = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
        facts = team.handshake(
            Facts(
                queries=mine[0],
                keys=mine[1],
                extra=mine[2],
                features=query.shape[1],
                dtype=str(query.dtype).removeprefix("torch."),
                device=query.device.type,
                call=f"{call} {reduction} {'' if options is None else options.named()}",
                gradient=" ".join(wanting) if torch.is_grad_enabled() and wanting else "none",
            )
        )
        sizes = [(fact.queries, fact.keys, fact.extra) for fact in facts]
    queries, keys, extras = zip(*sizes, strict=True)
    if team.size > 1 and not (sum(queries) and sum(keys)):
        remedy = "An empty batch has no loss; skip it or use drop_last=True in the loader."
        bad_value("global batch", expected="at least one row", got=f"none on any of {team.size} ranks", remedy=remedy)
    ring = Ring.flat(team, keys, total=sum(queries))
    extra_ring = None if extra is None else Ring.flat(team, extras, total=sum(queries))
    return Engine(ring, backend, tile, cache_bytes, extra_ring, precision)


def _reduce(per_row: Tensor, unit: float, reduction: Reduction, ring: Ring, weights: Tensor | None = None) -> Tensor:
    """`unit` times the rows, their sum, or their share of the global mean, each weighed."""
    if weights is not None:
        weights = weights.to(per_row.dtype)
        per_row = per_row * weights
    if reduction == "none":
        return per_row * unit
    if reduction == "sum":
        return per_row.sum() * unit
    if weights is None:
        return per_row.sum() * (unit * ring.team.size / ring.total)
    total = ring.team.sum(weights.sum(dtype=per_row.dtype))
    return per_row.sum() * (unit * ring.team.size / torch.where(total == 0, 1, total))
