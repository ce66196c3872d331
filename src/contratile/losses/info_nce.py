"""`info_nce`: the loss of queries against keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import GuideMargin, SameId, Spec
from contratile.errors import bad_value, check_labels, check_vector
from contratile.keywords import known_keywords
from contratile.losses.batch_stats import BatchStats
from contratile.losses.beside import Guide, LossTerms, Teacher
from contratile.losses.call import Call
from contratile.losses.cross_entropy import cross_entropies, loss_and_extras
from contratile.losses.directions import Direction, Directions, HardnessMode, PartitionMode
from contratile.losses.options import Ids, PairOptions
from contratile.reference import Reduction
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from contratile.losses.signatures import NegativeKeywords


@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    return_stats: Literal[False] = False,
    return_terms: Literal[False] = False,
    **keywords: Unpack[NegativeKeywords],
) -> Tensor: ...
@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    return_stats: Literal[True],
    return_terms: Literal[False] = False,
    **keywords: Unpack[NegativeKeywords],
) -> tuple[Tensor, BatchStats]: ...
@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    return_stats: Literal[False] = False,
    return_terms: Literal[True],
    **keywords: Unpack[NegativeKeywords],
) -> tuple[Tensor, LossTerms]: ...
@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    return_stats: Literal[True],
    return_terms: Literal[True],
    **keywords: Unpack[NegativeKeywords],
) -> tuple[Tensor, LossTerms, BatchStats]: ...
@known_keywords
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    ids: Ids | None = None,
    same_id: SameId = "exclude",
    in_batch_negatives: bool = True,
    extra_keys: Tensor | None = None,
    extra_ids: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    hard_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    extra_bias: Tensor | None = None,
    hard_bias: Tensor | None = None,
    margin: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    matryoshka_dims: Sequence[int] | None = None,
    matryoshka_weights: Sequence[float] | None = None,
    matryoshka_normalize: bool = True,
    teacher: Teacher | None = None,
    teacher_weight: float = 1.0,
    teacher_temperature: float = 1.0,
    guide: Guide | None = None,
    guide_margin: float = 0.0,
    guide_margin_strategy: GuideMargin = "absolute",
    extra_guide: Tensor | None = None,
    hard_guide: Tensor | None = None,
    return_stats: bool = False,
    return_terms: bool = False,
    hard_ids: Tensor | None = None,
    share_hard_negatives: bool = False,
    directions: tuple[Direction, ...] = ("query_to_doc",),
    partition_mode: PartitionMode = "joint",
    hardness_mode: HardnessMode | None = None,
    hardness_strength: float = 0.0,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
    ring: RingKind = "auto",
) -> Tensor | tuple[Any, ...]:
    """InfoNCE: cross-entropy of each query against all keys. Replaces

        return F.cross_entropy(scale * query @ key.T, labels)

    Features are not normalised here: pass normalised ones for cosine similarities.

    Args:
        query: Features [N, D].
        key: Features [M, D]; there may be more keys than queries.
        scale: The logit scale (inverse temperature): a number, or a 0-d tensor that may need a gradient.
        labels: [N] index of each query's positive among this rank's keys. None: key i is the positive of query i.
        ids: Integers, one per pair, or (query_ids, key_ids). Keys that share the query's id are not its negatives: see
            `same_id`.
        same_id: "exclude" leaves pairs of equal id out, except a query's own positive. "positive" makes them positives
            too, extra keys included: the log-sum-exp over all keys minus the mean score of the positives, as in
            SupCon. Not with margin or label_smoothing.
        in_batch_negatives: Use the other keys as negatives. False takes negatives only from `extra_keys` and
            `hard_negatives`, as in MoCo, and computes no N x N scores.
        extra_keys: [E, D] more negatives of all queries: a queue, mined negatives. Each rank passes its own; all
            queries of all ranks are compared with all of them.
        extra_ids: [E] ids of the extra keys, compared with the ids of the queries.
        hard_negatives: [N, H, D] negatives of one query each.
        hard_mask: [N, H] bool, False where a hard negative is padding.
        key_bias: [M] numbers added to the scaled scores of each key, with a gradient if they need one. -log q, where q
            is how often a key occurs in batches, corrects for that (logQ). A negative with a bias of -inf is left
            out; a positive's has to be finite. Statistics and margins go by similarities, without biases.
        extra_bias: [E] the same for the extra keys.
        hard_bias: [N, H] the same for the hard negatives.
        margin: Drop negatives more similar than the positive minus this margin (before the scale): they are probably
            false negatives.
        label_smoothing: Share of the target that is spread evenly over all keys that count.
        weights: [N] weights of the queries; the mean is sum(w * loss) / sum(w) over all ranks.
        matryoshka_dims: Sum the loss over the first 64, 128, ... features of every row, in one product: numbers in any
            order, with or without all features. Extra keys and hard negatives are truncated alike. Not with margin,
            label_smoothing, same_id="positive", return_stats, cache_bytes, further directions or hardness.
        matryoshka_weights: A weight for each of these losses; 1 each by default. The sum is not divided by them.
        matryoshka_normalize: Divide each truncated row by its norm, so that scores are cosines. False uses plain
            products.
        teacher: (query [N, T], key [M, T], scale) of a frozen model. Adds a distillation term, the cross-entropy
            between the teacher's softmax and the student's. With S = scale * query @ key.T:

                target = (teacher_scale / teacher_temperature * teacher_query @ teacher_key.T).softmax(1)
                distill = -(target * S.log_softmax(1)).sum(1)
                loss = contrastive + teacher_weight * distill

            The teacher gets no gradient. Not with extra keys, hard negatives, margin, smoothing or several positives.
        teacher_weight: Factor of that term.
        teacher_temperature: Divides the teacher's scores, not the student's: above 1 its targets are softer.
        guide: (query [N, G], key [M, G]) of a frozen model that removes false negatives, as GISTEmbed does: keys that
            it finds more similar than the positive are dropped.
        guide_margin: Drop keys whose guide similarity exceeds the positive's minus this margin.
        guide_margin_strategy: "absolute", or "relative": the positive's minus margin * abs(positive's).
        extra_guide: [E, G] the guide's features of the extra keys.
        hard_guide: [N, H, G] the guide's features of the hard negatives.
        return_stats: Return (loss, `BatchStats`) with top-1 accuracy, ranks and mean logits of queries against keys,
            without hardness and further directions.
        return_terms: Return (loss, `LossTerms`): the contrastive and the distillation term. With `return_stats` too:
            (loss, terms, statistics).
        hard_ids: [N, H] ids of the hard negatives, compared with the ids of the queries.
        share_hard_negatives: Compare every query, on all ranks, with the hard negatives of all queries.
        directions: What a query and its key are compared with in one loss, as sentence-transformers names it.
            "query_to_doc" (always): the query with all keys. "doc_to_query": its key with all queries.
            "query_to_query": the query with the other queries. "doc_to_doc": its key with the keys, extra keys and
            shared hard negatives of the others. Beyond "query_to_doc", key i must be the positive of query i.
        partition_mode: "joint" puts all directions into one softmax. "per_direction" averages a softmax for each of
            "query_to_doc" and "doc_to_query", as `clip_loss` does.
        hardness_mode: Negatives whose scores are raised by `hardness_strength` times their similarity, without a
            gradient: "in_batch_negatives" (keys and hard negatives of other queries, extra keys), "hard_negatives"
            (the query's own) or "all_negatives". It applies to "query_to_doc" only.
        hardness_strength: See `hardness_mode`, which has no effect at 0; 9 in LLaVE (in-batch negatives), 5 in
            EmbeddingGemma (hard ones).
        group: "auto" (the default process group if one is initialised), None (this process alone) or a process group.
            Over several ranks the loss and its backward are collective: every rank calls both.
        reduction: "mean", "sum" or "none" (one value per local query). Over ranks "mean" is world_size / N_total times
            the local sum, so that DDP's average of gradients is the gradient of the global mean.
        backend: "auto", "torch" (tiles), "triton" (kernels on CUDA and ROCm) or "dense" (materialises the scores, for
            comparison). "auto" uses "triton" where it runs and covers the call.
        tile: Rows and columns of a tile. None chooses them from the caches and cores of the machine.
        cache_bytes: Memory that may be spent on keeping score tiles for the backward pass, which saves one of four
            matrix products per tile kept. Results do not change.
        precision: How fp32 features are multiplied on hardware with TF32: "ieee", "tf32x3" (kernels only) or "tf32".
            None follows `torch.get_float32_matmul_precision()`.
        ring: How blocks travel between ranks: "flat" (one ring), "nodes" (rings inside nodes, and links between equal
            places of the nodes) or "auto" ("nodes" if the group has several nodes of equal size).

    Returns:
        The loss in fp32 (fp64 for fp64 features), or a tuple that starts with it.

    Raises:
        ValueError: A shape, label or option cannot be used.
        TypeError: An argument has the wrong type, dtype or device.

    Examples:
        >>> import torch, contratile as ct
        >>> query, key = torch.randn(100, 16), torch.randn(300, 16)
        >>> ct.info_nce(query, key, 0.5, labels=torch.arange(100) + 200, reduction="none").shape
        torch.Size([100])

        GTE's loss of pairs, with LLaVE's weights:

        >>> four = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
        >>> harder = {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0}
        >>> loss = ct.info_nce(query, key[:100], 20.0, directions=four, **harder)
    """
    more = Directions(directions, partition_mode, hardness_mode, hardness_strength, share_hard_negatives)
    options = PairOptions(
        ids=ids,
        same_id=same_id,
        in_batch_negatives=in_batch_negatives,
        extra_keys=extra_keys,
        extra_ids=extra_ids,
        hard_negatives=hard_negatives,
        hard_mask=hard_mask,
        hard_ids=hard_ids,
        key_bias=key_bias,
        extra_bias=extra_bias,
        hard_bias=hard_bias,
        more=more,
        margin=margin,
        label_smoothing=label_smoothing,
        weights=weights,
        return_stats=return_stats,
        matryoshka_dims=matryoshka_dims,
        matryoshka_weights=matryoshka_weights,
        matryoshka_normalize=matryoshka_normalize,
        teacher=teacher,
        teacher_weight=teacher_weight,
        teacher_temperature=teacher_temperature,
        return_terms=return_terms,
        guide=guide,
        guide_margin=guide_margin,
        guide_margin_strategy=guide_margin_strategy,
        extra_guide=extra_guide,
        hard_guide=hard_guide,
    )
    paired = labels is None
    spec = Spec(
        cols=more.back,
        paired=paired,
        ranks=return_stats,
        backend=backend,
        tile=tile,
        cache_bytes=cache_bytes,
        precision=precision,
        ring=ring,
    )

    def check() -> None:
        if labels is not None and more.several:
            remedy = "Document i is the positive of query i: reorder the keys, and pass further ones as extra_keys=."
            bad_value("labels", expected="none with directions=", got=f"{len(labels)} of them", remedy=remedy)
        if labels is not None:
            check_vector("labels", labels, length=len(query), device=query.device)
            if len(labels) and not torch.compiler.is_compiling():  # the compiled operator checks for itself
                check_labels(labels.long(), len(key))
        elif len(key) < len(query):
            remedy = "Without labels query i's positive is key i; pass labels= if queries share keys."
            bad_value("key", expected=f"at least {len(query)} rows", got=len(key), remedy=remedy)
        options.check(query, key, scale, spec)

    call = Call("info_nce", {"query": query, "key": key}, {"scale": scale}, spec, reduction, options)
    rings = call.start(group, check)
    labels = torch.arange(len(query), device=query.device) if labels is None else labels.long()
    losses = cross_entropies(query, key, scale, labels, options, spec, rings)
    mean_of_two = spec.cols and partition_mode == "per_direction"
    return loss_and_extras(call, losses, rings, share=0.5 if mean_of_two else 1.0)
