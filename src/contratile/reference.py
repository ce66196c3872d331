"""The dense oracle: every public loss as its formula, materialising the N x M scores.

This file defines what correct means. It is plain PyTorch, differentiable, works in any float dtype (fp64 in the tests)
and knows nothing of tiles or process groups. `backend="dense"` runs its `pair_stats`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
Ids = Tensor | tuple[Tensor, Tensor]
SameId = Literal["exclude", "positive"]
GuideMargin = Literal["absolute", "relative"]
Teacher = tuple[Tensor, Tensor, Tensor | float]
Guide = tuple[Tensor, Tensor]
INF = float("inf")


def pair_stats(
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float = 1.0,
    bias: Tensor | float | None = None,
    labels: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    query_classes: Tensor | None = None,
    key_classes: Tensor | None = None,
    query_level: Tensor | None = None,
    *,
    key_bias: Tensor | None = None,
    reduce: Literal["lse", "softplus"] = "lse",
    rows: bool = True,
    cols: bool = True,
    exclude_self: bool = False,
    margin: float = INF,
    ranks: bool = False,
    ties: bool = False,
    differ: bool = False,
    same_id: SameId = "exclude",
    without_labelled: bool = False,
    hardness: float = 0.0,
    teacher: Teacher | None = None,
    guide: Guide | None = None,
    guide_level: Tensor | None = None,
    guide_margin: float = 0.0,
    guide_relative: bool = False,
) -> dict[str, Tensor]:
    """Statistics of the scores S = scale * Q K^T + bias + key_bias over the pairs that count, natural logarithm.

    row [N], col [M]            log-sum-exps, or row sums of softplus(S) with positives' softplus(-S)
    pos [N]                     S[i, labels_i], wherever labels are given
    row_sums, row_counts        [N] sums and counts of scale * Q K^T over keys of equal class (`differ`: another class)
    row_higher, col_higher      number of scores above the positive's, with `ranks`
    row_equal, col_equal        number of scores equal to the positive's, itself included, with `ties`
    level [N]                   the positives' products <q, k>, with `ranks` or `margin`
    row_cross, col_cross        mean of scores minus pos (a constant) under the softmax of the teacher's scores
    guide_level [N]             the guide's products of the positives

    Pairs of equal id do not count unless labelled; with `same_id="positive"` they are positives too, which ranks do not
    count. `without_labelled` leaves the labelled pairs out of the sums. With `margin`, products above the positive's
    product minus `margin` are dropped, for rows and columns separately. Products are compared before the scale (negated
    if the scale is negative), so that exact ties stay ties. Rows add `hardness` times the product, as a constant, to
    all scores except the labelled ones. A `guide` drops pairs in the same way by its own products: those above the
    positive's minus `guide_margin` (times its absolute value if `guide_relative`).
    """
    key = query if key is None else key
    products = query @ key.T
    similar = scale * products
    every = similar if bias is None else similar + bias
    every = every if key_bias is None else every + key_bias
    order = torch.where(torch.as_tensor(scale) < 0, -products, products).detach()
    is_pos = torch.zeros_like(every, dtype=torch.bool)
    out: dict[str, Tensor] = {}
    level = query_level
    if labels is not None:
        out["pos"] = every.gather(1, labels.unsqueeze(1)).squeeze(1)
        is_pos.scatter_(1, labels.unsqueeze(1), True)
        if ranks or margin < INF:
            out["level"] = level = order.gather(1, labels.unsqueeze(1)).squeeze(1)
    left_out, same = torch.zeros_like(is_pos), torch.zeros_like(is_pos)
    if query_ids is not None and key_ids is not None:
        same = (query_ids.unsqueeze(1) == key_ids) & ~is_pos
    if same_id == "exclude":
        left_out = same
    if exclude_self:
        left_out = left_out | torch.eye(*every.shape, dtype=torch.bool, device=query.device)
    similar_to_guide = None
    if guide is not None:
        similar_to_guide = guide[0] @ guide[1].T
        if labels is not None:
            out["guide_level"] = guide_level = similar_to_guide.gather(1, labels.unsqueeze(1)).squeeze(1)
    scores, order = every.masked_fill(left_out, -INF), order.masked_fill(left_out | same, -INF)
    turned = is_pos | same if same_id == "positive" else is_pos
    for side, dim, wanted in (("row", 1, rows), ("col", 0, cols)):
        if not wanted:
            continue
        bar = None
        if level is not None:  # for a column: its own positive's, if it has one
            bar = level.unsqueeze(1) if side == "row" else _column_levels(level, labels, len(key))
        counted = scores
        if margin < INF and bar is not None:
            counted = scores.masked_fill((order > bar - margin) & ~is_pos, -INF)
        if hardness and side == "row":
            counted = counted + (hardness * products.detach()).masked_fill(is_pos, 0)
        if similar_to_guide is not None and guide_level is not None:
            at = guide_level.unsqueeze(1) if side == "row" else _column_levels(guide_level, labels, len(key))
            limit = guide_limit(at, guide_margin, relative=guide_relative)
            counted = counted.masked_fill((similar_to_guide > limit) & ~is_pos, -INF)
        if teacher is not None:
            assert labels is not None
            weights = (teacher[2] * (teacher[0] @ teacher[1].T)).masked_fill(left_out, -INF).softmax(dim)
            centre = out["pos"] if side == "row" else out["pos"].new_zeros(len(key)).scatter(0, labels, out["pos"])
            centred = every - centre.detach().unsqueeze(dim)
            out[f"{side}_cross"] = (weights * centred.masked_fill(left_out, 0)).sum(dim)
        if reduce == "lse":
            out[side] = counted.logsumexp(dim)
        else:  # F.softplus is cut off at 20
            out[side] = -F.logsigmoid(torch.where(turned, counted, -counted)).sum(dim)
        if query_classes is not None and key_classes is not None:
            summed = (query_classes.unsqueeze(1) == key_classes) != differ
            if without_labelled:
                summed = summed & ~is_pos
            if exclude_self:
                summed = summed & ~torch.eye(*every.shape, dtype=torch.bool, device=query.device)
            out[f"{side}_sums"] = (similar * summed).sum(dim)
            out[f"{side}_counts"] = summed.sum(dim).to(every.dtype)
        if ranks and bar is not None:
            out[f"{side}_higher"] = (order > bar).sum(dim).to(every.dtype)
            if ties:
                out[f"{side}_equal"] = (order == bar).sum(dim).to(every.dtype)
    return out


def guide_limit(level: Tensor, margin: float, *, relative: bool) -> Tensor:
    """The highest guide product that counts, given the positive's."""
    return torch.where(level.isinf(), level, level - (level.abs() * margin if relative else margin))


def _column_levels(level: Tensor, labels: Tensor | None, keys: int) -> Tensor:
    """Per column: the best product with a query whose positive it is; infinite (nothing is above) if there is none."""
    found = level.new_full((keys,), INF)
    return found if labels is None else found.scatter_reduce(0, labels, level, "amax", include_self=False)


def pair_lse(
    query: Tensor, key: Tensor | None, scale: Tensor | float = 1.0, *, rows: bool = True, cols: bool = True
) -> tuple[Tensor, Tensor]:
    """Row and column log-sum-exps of scale * Q K^T. A side that is not requested is empty."""
    stats = pair_stats(query, key, scale, rows=rows, cols=cols)
    return stats.get("row", query.new_empty(0)), stats.get("col", query.new_empty(0))


def cross_entropies(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    labels: Tensor,
    *,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    same_id: SameId = "exclude",
    in_batch_negatives: bool = True,
    extra_keys: Tensor | None = None,
    extra_ids: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    hard_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    extra_bias: Tensor | None = None,
    hard_bias: Tensor | None = None,
    hard_ids: Tensor | None = None,
    share_hard_negatives: bool = False,
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    further: Tensor | None = None,
    margin: float | None = None,
    label_smoothing: float = 0.0,
    teacher: Teacher | None = None,
    teacher_weight: float = 1.0,
    teacher_temperature: float = 1.0,
    guide: Guide | None = None,
    extra_guide: Tensor | None = None,
    hard_guide: Tensor | None = None,
    guide_margin: float = 0.0,
    guide_margin_strategy: GuideMargin = "absolute",
) -> Tensor:
    """The cross-entropy of each query against keys, extra keys and hard negatives (its own, or those of all queries).

    Keys that share the query's id are left out, or are positives too: then the target is the mean of the positives'
    scores. `further` scores [N, any number] join the same softmax. A `teacher` adds the cross-entropy between its
    softmax and this one. A `guide` drops keys that it finds more similar than the positive.
    """
    blocks = [query @ key.T]
    biases = [torch.zeros_like(blocks[0]) if key_bias is None else key_bias.expand_as(blocks[0])]
    is_label = F.one_hot(labels, len(key)).bool()
    same = [torch.zeros_like(is_label)]
    if query_ids is not None and key_ids is not None:
        same = [query_ids.unsqueeze(1) == key_ids]
    counts = [torch.ones_like(is_label) if in_batch_negatives else is_label]
    if extra_keys is not None:
        blocks.append(query @ extra_keys.T)
        biases.append(torch.zeros_like(blocks[-1]) if extra_bias is None else extra_bias.expand_as(blocks[-1]))
        counts.append(torch.ones_like(blocks[-1], dtype=torch.bool))
        same.append(~counts[-1])
        if query_ids is not None and extra_ids is not None:
            same[-1] = query_ids.unsqueeze(1) == extra_ids
    others = sum(block.shape[1] for block in blocks)
    if hard_negatives is not None:
        blocks.append(torch.einsum("nd,mhd->nmh", query, hard_negatives).flatten(1))
        biases.append(torch.zeros_like(blocks[-1]) if hard_bias is None else hard_bias.flatten().expand_as(blocks[-1]))
        owned = torch.eye(len(query), dtype=torch.bool, device=query.device)
        owned = owned.repeat_interleave(hard_negatives.shape[1], 1)
        counted = torch.ones_like(owned) if hard_mask is None else hard_mask.flatten().expand_as(owned)
        counts.append(counted if share_hard_negatives else counted & owned)
        same.append(torch.zeros_like(counted))
        if query_ids is not None and hard_ids is not None:
            same[-1] = query_ids.unsqueeze(1) == hard_ids.flatten()
    similar, count, alike = torch.cat(blocks, 1), torch.cat(counts, 1), torch.cat(same, 1)
    is_label = F.pad(is_label, (0, similar.shape[1] - len(key)))
    is_own = torch.zeros_like(is_label) if hard_negatives is None else F.pad(owned, (others, 0))
    is_pos = is_label
    if same_id == "positive":
        is_pos = (is_label | alike) & count
    else:
        count = count & (~alike | is_label)
    if margin is not None:
        level = similar.gather(1, labels.unsqueeze(1))
        count = count & ((similar <= level - margin) | is_label)
    if guide is not None:
        seen = [guide[0] @ guide[1].T]
        if extra_guide is not None:
            seen.append(guide[0] @ extra_guide.T)
        if hard_guide is not None:
            seen.append(torch.einsum("nd,mhd->nmh", guide[0], hard_guide).flatten(1))
        level = seen[0].gather(1, labels.unsqueeze(1))
        limit = guide_limit(level, guide_margin, relative=guide_margin_strategy == "relative")
        count = count & ((torch.cat(seen, 1) <= limit) | is_label)
    scores = scale * similar + torch.cat(biases, 1)
    if hardness_mode is not None:
        hard = {"in_batch_negatives": ~is_own, "hard_negatives": is_own, "all_negatives": ~torch.zeros_like(is_own)}
        scores = scores + hardness_strength * similar.detach() * (hard[hardness_mode] & ~is_label)
    every = scores.masked_fill(~count, -INF)
    lse = (every if further is None else torch.cat([every, further], 1)).logsumexp(1)
    mean = torch.where(count, scores, 0).sum(1) / count.sum(1) if label_smoothing else 0
    pos = torch.where(is_pos, scores, 0).sum(1) / is_pos.sum(1)
    losses = lse - (1 - label_smoothing) * pos - label_smoothing * mean
    if teacher is None:
        return losses
    target = (teacher[2] / teacher_temperature * teacher[0] @ teacher[1].T).masked_fill(~count, -INF).softmax(1)
    return losses - teacher_weight * (target * (scores - lse.unsqueeze(1)).masked_fill(~count, 0)).sum(1)


def prefix(x: Tensor, dim: int, normalize: bool) -> Tensor:
    """The first features of each row, divided by their norm."""
    x = x[..., :dim]
    return F.normalize(x, dim=-1) if normalize else x


def with_dims(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: `matryoshka_dims` sums a loss over truncated rows of both sides, extra keys and hard negatives."""
    names = list(signature(loss).parameters)
    features = *names[:2], "extra_keys", "hard_negatives"

    @wraps(loss)
    def call(
        *arguments: Any,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        matryoshka_normalize: bool = True,
        **options: Any,
    ) -> Tensor:
        if matryoshka_dims is None:
            return loss(*arguments, **options)
        given = {**dict(zip(names, arguments, strict=False)), **options}
        total: Tensor = given[names[0]].new_zeros(())
        for dim, weight in zip(matryoshka_dims, matryoshka_weights or [1.0] * len(matryoshka_dims), strict=True):
            cut = {name: given[name] for name in features if given.get(name) is not None}
            cut = {name: prefix(x, dim, matryoshka_normalize) for name, x in cut.items()}
            total = total + weight * loss(**{**given, **cut})
        return total

    return call


@with_dims
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    ids: Ids | None = None,
    same_id: SameId = "exclude",
    margin: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    teacher: Teacher | None = None,
    teacher_weight: float = 1.0,
    teacher_temperature: float = 1.0,
    guide: Guide | None = None,
    guide_margin: float = 0.0,
    guide_margin_strategy: GuideMargin = "absolute",
    reduction: Reduction = "mean",
    **negatives: Tensor | None,
) -> Tensor:
    """Half the cross-entropy of each image against all texts plus half that of each text against all images.

    `negatives` belong to the images: extra_keys, extra_ids, hard_negatives, hard_mask, their guide features, and the
    biases of texts.
    """
    labels = torch.arange(len(image), device=image.device)
    of_images, of_texts = ids if isinstance(ids, tuple) else (ids, ids)
    options: dict[str, Any] = {
        "same_id": same_id,
        "margin": margin,
        "label_smoothing": label_smoothing,
        "teacher_weight": teacher_weight,
        "teacher_temperature": teacher_temperature,
        "guide_margin": guide_margin,
        "guide_margin_strategy": guide_margin_strategy,
    }
    of_rows: dict[str, Any] = {**negatives, "query_ids": of_images, "key_ids": of_texts}
    rows = cross_entropies(image, text, scale, labels, **of_rows, **options, teacher=teacher, guide=guide)
    if teacher is not None:
        teacher = teacher[1], teacher[0], teacher[2]
    if guide is not None:
        guide = guide[1], guide[0]
    of_cols: dict[str, Any] = {"query_ids": of_texts, "key_ids": of_images}
    cols = cross_entropies(text, image, scale, labels, **of_cols, **options, teacher=teacher, guide=guide)
    return reduce_rows((rows + cols) / 2, reduction, weights)


@with_dims
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    ids: Ids | None = None,
    same_id: SameId = "exclude",
    in_batch_negatives: bool = True,
    share_hard_negatives: bool = False,
    directions: Sequence[str] = ("query_to_doc",),
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    margin: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **negatives: Any,
) -> Tensor:
    """Cross-entropy of each query against all keys; `labels` (default: 0, 1, 2, ...) index the positives.

    With several `directions` the scores of all are in one softmax, or each has its own and the losses are averaged.
    """
    labels = torch.arange(len(query), device=query.device) if labels is None else labels
    of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
    options: dict[str, Any] = {
        "same_id": same_id,
        "in_batch_negatives": in_batch_negatives,
        "margin": margin,
        "label_smoothing": label_smoothing,
        "share_hard_negatives": share_hard_negatives,
        "hardness_mode": hardness_mode,
        "hardness_strength": hardness_strength,
    }
    joint: dict[str, Any] = {}
    if partition_mode == "joint":
        of_hard = negatives.get("hard_negatives") if share_hard_negatives else None
        others = negatives.get("extra_keys"), negatives.get("extra_ids"), of_hard, negatives.get("hard_ids")
        joint["further"] = _other_directions(query, key, scale, (of_queries, of_keys), others, directions, margin)
    options |= joint | negatives
    rows = cross_entropies(query, key, scale, labels, query_ids=of_queries, key_ids=of_keys, **options)
    if "doc_to_query" in directions and partition_mode == "per_direction":
        cols = cross_entropies(key, query, scale, labels, query_ids=of_keys, key_ids=of_queries, margin=margin)
        rows = (rows + cols) / 2
    return reduce_rows(rows, reduction, weights)


def _other_directions(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    ids: tuple[Tensor | None, Tensor | None],
    others: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    directions: Sequence[str],
    margin: float | None,
) -> Tensor:
    """The scores of all directions except query to document, -inf where a pair does not count. `others` are extra
    keys, their ids, hard negatives [N, H, D] and their ids."""
    n = len(query)
    extra, extra_ids, hard, hard_ids = others
    own = torch.eye(n, dtype=torch.bool, device=query.device)
    nobody = torch.zeros(n, 0, dtype=torch.bool, device=query.device)

    def scores(left: Tensor, right: Tensor, left_ids: Tensor | None, right_ids: Tensor | None, out: Tensor) -> Tensor:
        if left_ids is not None and right_ids is not None:
            out = out | (left_ids.unsqueeze(1) == right_ids)
        return (scale * left @ right.T).masked_fill(out, -INF)

    found = [scores(query, query[:0], None, None, nobody)]
    if "query_to_query" in directions:
        found.append(scores(query, query, ids[0], ids[0], own))
    if "doc_to_query" in directions:
        same = torch.zeros_like(own) if ids[0] is None or ids[1] is None else ids[1].unsqueeze(1) == ids[0]
        similar = key @ query.T
        if margin is not None:
            same = same | (similar > similar.diagonal().unsqueeze(1) - margin)
        found.append((scale * similar).masked_fill(same & ~own, -INF))
    if "doc_to_doc" in directions:
        found.append(scores(key, key, ids[1], ids[1], own))
        if extra is not None:
            found.append(scores(key, extra, ids[1], extra_ids, torch.zeros_like(own[:, :1])))
        if hard is not None:
            its_ids = None if hard_ids is None else hard_ids.flatten()
            found.append(scores(key, hard.flatten(0, 1), ids[1], its_ids, own.repeat_interleave(hard.shape[1], 1)))
    return torch.cat(found, 1)


def nt_xent(z1: Tensor, z2: Tensor, temperature: Tensor | float = 0.5, *, reduction: Reduction = "mean") -> Tensor:
    """Each of 2N views against all others; its positive is the other view of the same example."""
    z = torch.cat([z1, z2])
    scores = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -INF)
    return reduce_rows(
        F.cross_entropy(scores, torch.arange(len(z), device=z.device).roll(len(z1)), reduction="none"), reduction
    )


def sup_con(z: Tensor, labels: Tensor, temperature: Tensor | float = 0.1, *, reduction: Reduction = "mean") -> Tensor:
    """Per anchor the mean of -log softmax over its positives, self excluded. Anchors without a positive are 0 and do
    not count in the mean."""
    scores = z @ z.T / temperature
    self = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = (labels.unsqueeze(1) == labels) & ~self
    log_prob = scores - scores.masked_fill(self, -INF).logsumexp(1, keepdim=True)
    count = positive.sum(1)
    rows = -torch.where(positive, log_prob, 0).sum(1) / count.clamp(min=1)
    return rows.sum() / (count > 0).sum().clamp(min=1) if reduction == "mean" else reduce_rows(rows, reduction)


@with_dims
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Ids | None = None,
    same_id: SameId = "exclude",
    reduction: Reduction = "mean",
) -> Tensor:
    """Per image the sum over all texts of -log sigmoid(+-(S + bias)), with + for its own text.

    Other texts of its id are left out, or have a + too.
    """
    logits = scale * (image @ text.T) + bias
    positive = torch.eye(len(image), dtype=torch.bool, device=logits.device)
    terms = torch.where(positive, F.logsigmoid(logits), F.logsigmoid(-logits))
    if ids is not None:
        of_images, of_texts = ids if isinstance(ids, tuple) else (ids, ids)
        same = (of_images.unsqueeze(1) == of_texts) & ~positive
        terms = torch.where(same, F.logsigmoid(logits) if same_id == "positive" else 0, terms)
    return reduce_rows(-terms.sum(1), reduction)


def reduce_rows(per_row: Tensor, reduction: Reduction, weights: Tensor | None = None) -> Tensor:
    """The rows, their sum, or their mean, weighted."""
    if weights is not None:
        per_row = per_row * weights
    if reduction == "none":
        return per_row
    return per_row.sum() / (1 if reduction == "sum" else len(per_row) if weights is None else weights.sum())
