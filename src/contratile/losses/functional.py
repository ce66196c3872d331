"""The losses as functions: each is a few lines on the engine.

No loss normalises its features, but for truncated ones (`matryoshka_dims`): pass normalised ones where cosines are
meant. Losses are fp32 (fp64 for fp64 features),
also for 16-bit features; gradients have the dtype of the tensors they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import GuideMargin, Inputs, SameId, Spec
from contratile.errors import bad_value, check_labels, check_pairs, check_temperature, check_vector
from contratile.keywords import known_keywords
from contratile.losses.batch_stats import BatchStats, Tally, batch_stats
from contratile.losses.beside import Guide, LossTerms, Teacher
from contratile.losses.cross_entropy import (
    Losses,
    as_tensor,
    class_losses,
    cross_entropies,
    lse_above,
    sigmoid_stats,
)
from contratile.losses.directions import Direction, Directions, HardnessMode, PartitionMode
from contratile.losses.options import Call, Ids, PairOptions, Rings
from contratile.reference import Reduction
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Keywords(TypedDict, total=False):
    """The keywords of every loss, for type checkers."""

    group: Group
    reduction: Reduction
    backend: Backend
    tile: int | None
    cache_bytes: int
    precision: Precision | None
    ring: RingKind


class SigLipKeywords(Keywords, total=False):
    """The keywords of `siglip_loss`."""

    ids: Ids | None
    same_id: SameId
    matryoshka_dims: Sequence[int] | None
    matryoshka_weights: Sequence[float] | None
    matryoshka_normalize: bool


class PairKeywords(Keywords, total=False):
    """The keywords of `clip_loss` and `info_nce`."""

    ids: Ids | None
    same_id: SameId
    extra_keys: Tensor | None
    extra_ids: Tensor | None
    hard_negatives: Tensor | None
    hard_mask: Tensor | None
    key_bias: Tensor | None
    extra_bias: Tensor | None
    hard_bias: Tensor | None
    margin: float | None
    label_smoothing: float
    weights: Tensor | None
    matryoshka_dims: Sequence[int] | None
    matryoshka_weights: Sequence[float] | None
    matryoshka_normalize: bool
    teacher: Teacher | None
    teacher_weight: float
    teacher_temperature: float
    guide: Guide | None
    guide_margin: float
    guide_margin_strategy: GuideMargin
    extra_guide: Tensor | None
    hard_guide: Tensor | None


class NegativeKeywords(PairKeywords, total=False):
    """The keywords of `info_nce` alone."""

    in_batch_negatives: bool
    hard_ids: Tensor | None
    share_hard_negatives: bool
    directions: tuple[Direction, ...]
    partition_mode: PartitionMode
    hardness_mode: HardnessMode | None
    hardness_strength: float


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
    ring: RingKind = "auto",
) -> tuple[Tensor, Tensor]:
    """Row and column log-sum-exps of the scores, without the scores. Replaces

        scores = scale * query @ key.T
        return scores.logsumexp(1), scores.logsumexp(0)

    Args:
        query: Features [N, D].
        key: Features [M, D]. None means the queries themselves, at half the work.
        scale: A number, or a 0-d tensor that may need a gradient.
        rows: Return the log-sum-exp of each query over all keys.
        cols: Return the log-sum-exp of each key over all queries.
        group: "auto" (the default process group if one is initialised), None (this process alone) or a process group.
            Over several ranks the call and its backward are collective.
        backend: "auto", "torch" (tiles), "triton" (kernels on CUDA and ROCm) or "dense" (materialises the scores).
        tile: Rows and columns of a tile. None chooses them from the caches and cores of the machine.
        cache_bytes: Memory that may be spent on keeping score tiles for the backward pass. Results do not change.
        precision: How fp32 features are multiplied on hardware with TF32: "ieee", "tf32x3" or "tf32". None follows
            `torch.get_float32_matmul_precision()`.
        ring: How blocks travel between ranks: "flat" (one ring), "nodes" (rings inside nodes, and links between equal
            places of the nodes) or "auto" ("nodes" if the group has several nodes of equal size).

    Returns:
        (row_lse [N], col_lse [M]), natural logarithm, differentiable. A side that is not asked for is empty.

    Raises:
        ValueError: A shape or an option cannot be used.
        TypeError: An argument has the wrong type, dtype or device.

    Examples:
        >>> import torch, contratile as ct
        >>> row, col = ct.pair_lse(torch.randn(8, 4), torch.randn(6, 4), 2.0)
        >>> row.shape, col.shape
        (torch.Size([8]), torch.Size([6]))
    """
    features = {"query": query} if key is None else {"query": query, "key": key}
    spec = Spec(
        rows=rows, cols=cols, backend=backend, tile=tile, cache_bytes=cache_bytes, precision=precision, ring=ring
    )
    rings = Call("pair_lse", features, {"scale": scale}, spec).start(group)
    stats = pair_stats(rings.keys, Inputs(query, key, as_tensor(scale, query)), spec)
    row, col = (query.new_empty(0) if side.total is None else stats.nats(side.total) for side in (stats.row, stats.col))
    return row, col


@overload
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    return_stats: Literal[False] = False,
    return_terms: Literal[False] = False,
    **keywords: Unpack[PairKeywords],
) -> Tensor: ...
@overload
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    return_stats: Literal[True],
    return_terms: Literal[False] = False,
    **keywords: Unpack[PairKeywords],
) -> tuple[Tensor, BatchStats]: ...
@overload
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    return_stats: Literal[False] = False,
    return_terms: Literal[True],
    **keywords: Unpack[PairKeywords],
) -> tuple[Tensor, LossTerms]: ...
@overload
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    return_stats: Literal[True],
    return_terms: Literal[True],
    **keywords: Unpack[PairKeywords],
) -> tuple[Tensor, LossTerms, BatchStats]: ...
@known_keywords
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float = 1.0,
    *,
    ids: Ids | None = None,
    same_id: SameId = "exclude",
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
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
    ring: RingKind = "auto",
) -> Tensor | tuple[Any, ...]:
    """CLIP's symmetric contrastive loss over pairs (image_i, text_i). Replaces

        logits = scale * image @ text.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    Features are not normalised here: pass normalised ones for cosine similarities.

    Args:
        image: Features [N, D].
        text: Features [N, D]; text i is the positive of image i.
        scale: The logit scale (inverse temperature): a number, or a 0-d tensor that may need a gradient.
        ids: Integers, one per pair, or (image_ids, text_ids). Texts that share the image's id (duplicates, several
            captions of one image) are not its negatives: see `same_id`.
        same_id: "exclude" leaves pairs of equal id out, except an image's own text. "positive" makes them positives
            too, extra keys included: the log-sum-exp over all keys minus the mean score of the positives, for both
            directions, as in SupCon. It has no margin and no label smoothing.
        extra_keys: [E, D] more texts, negatives of all images: a queue, mined negatives. Each rank passes its own;
            all images of all ranks are compared with all of them.
        extra_ids: [E] ids of the extra keys, compared with the ids of the images.
        hard_negatives: [N, H, D] texts that are negatives of one image each.
        hard_mask: [N, H] bool, False where a hard negative is padding.
        key_bias: [N] numbers added to the scaled scores of each text, with a gradient if they need one. -log q, where q
            is how often a text occurs in batches, corrects for that (logQ). It cancels where texts are compared with
            images. Statistics and margins go by similarities, without biases.
        extra_bias: [E] the same for the extra keys.
        hard_bias: [N, H] the same for the hard negatives.
        margin: Drop negatives more similar than the positive minus this margin (before the scale): they are probably
            false negatives.
        label_smoothing: Share of the target that is spread evenly over all keys that count.
        weights: [N] weights of the pairs; the mean is sum(w * loss) / sum(w) over all ranks.
        matryoshka_dims: Sum the loss over the first 64, 128, ... features of every row, in one product: numbers in any
            order, with or without all features. Extra keys and hard negatives are truncated alike. Not with margin,
            label_smoothing, same_id="positive", return_stats or cache_bytes.
        matryoshka_weights: A weight for each of these losses; 1 each by default. The sum is not divided by them.
        matryoshka_normalize: Divide each truncated row by its norm, so that scores are cosines: with `matryoshka_dims`
            losses do normalise. False takes plain products.
        teacher: (image [N, T], text [N, T], scale) of a frozen model. Adds, for both directions, the cross-entropy
            between the softmax of its scores and that of these, as open_clip's DistillClipLoss: with S the scores here,

                target = (teacher_scale / teacher_temperature * teacher_image @ teacher_text.T).softmax(1)
                distill = -(target * S.log_softmax(1)).sum(1)
                loss = contrastive + teacher_weight * distill

            It has no gradient. Not together with extra keys, hard negatives, margin, smoothing or several positives.
        teacher_weight: Factor of that term.
        teacher_temperature: Divides the teacher's scores alone: above 1 its targets are softer. The temperature of the
            scores here is 1 / scale.
        guide: (image [N, G], text [N, G]) of a frozen model that drops false negatives, as GISTEmbed does: pairs that
            it finds more similar than the positive do not count, for each direction by its own positive.
        guide_margin: Drop pairs with a product of the guide above positive - margin instead.
        guide_margin_strategy: "absolute", or "relative": above positive - margin * abs(positive).
        extra_guide: [E, G] the guide's features of the extra keys.
        hard_guide: [N, H, G] the same of the hard negatives.
        return_stats: Return (loss, `BatchStats`) with top-1 accuracy, ranks and mean logits.
        return_terms: Return (loss, `LossTerms`): the contrastive and the distillation term. With both, (loss, terms,
            statistics).
        group: "auto" (the default process group if one is initialised), None (this process alone) or a process group.
            Over several ranks the loss and its backward are collective: every rank calls both.
        reduction: "mean", "sum" or "none" (one value per local pair). Over ranks "mean" is world_size / N_total times
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
        >>> image, text = (torch.nn.functional.normalize(torch.randn(1000, 64), dim=1) for _ in range(2))
        >>> loss = ct.clip_loss(image.requires_grad_(), text, 100.0)
        >>> loss.backward()
        >>> of_prefixes = ct.clip_loss(image, text, 100.0, matryoshka_dims=(16, 32, 64))
    """
    options = PairOptions(
        *(ids, same_id, extra_keys, extra_ids, hard_negatives, hard_mask),
        *(margin, label_smoothing, weights, return_stats),
        *(True, key_bias, extra_bias, hard_bias),
        *(matryoshka_dims, matryoshka_weights, matryoshka_normalize),
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
    spec = Spec(
        paired=True,
        ranks=return_stats,
        backend=backend,
        tile=tile,
        cache_bytes=cache_bytes,
        precision=precision,
        ring=ring,
    )

    def check() -> None:
        check_pairs("image and text", image, text)
        options.check(image, text, scale, spec)

    call = Call("clip_loss", {"image": image, "text": text}, {"scale": scale}, spec, reduction, options)
    rings = call.start(group, check)
    labels = torch.arange(image.shape[0], device=image.device)
    losses = cross_entropies(image, text, scale, labels, options, spec, rings)
    return _answer(call, losses, rings, share=0.5)


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
            SupCon. It has no margin and no label smoothing.
        in_batch_negatives: Use the other keys as negatives. False takes negatives only from `extra_keys` and
            `hard_negatives`, as in MoCo, and computes no N x N scores.
        extra_keys: [E, D] more negatives of all queries: a queue, mined negatives. Each rank passes its own; all
            queries of all ranks are compared with all of them.
        extra_ids: [E] ids of the extra keys, compared with the ids of the queries.
        hard_negatives: [N, H, D] negatives of one query each.
        hard_mask: [N, H] bool, False where a hard negative is padding.
        key_bias: [M] numbers added to the scaled scores of each key, with a gradient if they need one. -log q, where q
            is how often a key occurs in batches, corrects for that (logQ). Statistics and margins go by
            similarities, without biases.
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
        matryoshka_normalize: Divide each truncated row by its norm, so that scores are cosines: with `matryoshka_dims`
            losses do normalise. False takes plain products.
        teacher: (query [N, T], key [M, T], scale) of a frozen model. Adds the cross-entropy between the softmax of its
            scores and that of these, S:

                target = (teacher_scale / teacher_temperature * teacher_query @ teacher_key.T).softmax(1)
                distill = -(target * S.log_softmax(1)).sum(1)
                loss = contrastive + teacher_weight * distill

            It has no gradient. Not together with extra keys, hard negatives, margin, smoothing or several positives.
        teacher_weight: Factor of that term.
        teacher_temperature: Divides the teacher's scores alone: above 1 its targets are softer. The temperature of the
            scores here is 1 / scale.
        guide: (query [N, G], key [M, G]) of a frozen model that drops false negatives, as GISTEmbed does: keys that it
            finds more similar than the positive do not count.
        guide_margin: Drop keys with a product of the guide above positive - margin instead.
        guide_margin_strategy: "absolute", or "relative": above positive - margin * abs(positive).
        extra_guide: [E, G] the guide's features of the extra keys.
        hard_guide: [N, H, G] the same of the hard negatives.
        return_stats: Return (loss, `BatchStats`) with top-1 accuracy, ranks and mean logits, of queries against keys
            by similarity: without hardness and further directions.
        return_terms: Return (loss, `LossTerms`): the contrastive and the distillation term. With both, (loss, terms,
            statistics).
        hard_ids: [N, H] ids of the hard negatives, compared with the ids of the queries.
        share_hard_negatives: Hard negatives are negatives of all queries, of all ranks, too.
        directions: What a query and its key are compared with in one loss, as sentence-transformers names it.
            "query_to_doc" (always): the query with all keys. "doc_to_query": its key with all queries.
            "query_to_query": the query with the other queries. "doc_to_doc": its key with the keys, extra keys and
            shared hard negatives of the others. Beyond "query_to_doc", key i must be the positive of query i.
        partition_mode: "joint" puts all directions into one softmax. "per_direction" averages a softmax for each of
            "query_to_doc" and "doc_to_query", as `clip_loss` does.
        hardness_mode: Which negatives of a query get `hardness_strength` times their similarity, as a constant, on top
            of their scores: "in_batch_negatives" (keys and hard negatives of other queries, extra keys),
            "hard_negatives" (its own) or "all_negatives". Only "query_to_doc" has it, and never a positive.
        hardness_strength: See `hardness_mode`; 9 in LLaVE (in-batch negatives), 5 in EmbeddingGemma (hard ones).
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
        *(ids, same_id, extra_keys, extra_ids, hard_negatives, hard_mask),
        *(margin, label_smoothing, weights, return_stats, in_batch_negatives),
        *(key_bias, extra_bias, hard_bias),
        hard_ids=hard_ids,
        more=more,
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
            bad_value("labels", expected="none beside directions=", got=f"{len(labels)} of them", remedy=remedy)
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
    return _answer(call, losses, rings, share=0.5 if mean_of_two else 1.0)


def _answer(call: Call, losses: Losses, rings: Rings, share: float = 1.0) -> Tensor | tuple[Any, ...]:
    """The loss, followed by its terms and the statistics where they are asked for."""
    per_pair, options = losses.per_pair, call.options
    assert options is not None
    more: list[Any] = []
    if options.return_terms:
        assert losses.distill is not None
        terms = (call.reduce(x, losses.stats, rings.keys, share=share) for x in (per_pair, losses.distill))
        more.append(LossTerms(*terms))
        loss = more[0].contrastive + more[0].distill
    else:
        per_pair = per_pair if losses.distill is None else per_pair + losses.distill
        loss = call.reduce(per_pair, losses.stats, rings.keys, share=share)
    if losses.batch is not None:
        more.append(losses.batch)
    return (loss, *more) if more else loss


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
    ring: RingKind = "auto",
) -> Tensor | tuple[Tensor, BatchStats]:
    """SimCLR's NT-Xent: each view against all other views; its positive is the other view of the example. Replaces

        z = torch.cat([z1, z2])
        scores = (z @ z.T / temperature).fill_diagonal_(-inf)
        return F.cross_entropy(scores, torch.arange(2 * n).roll(n))

    Scores are symmetric: on one process only the upper triangle of tiles is computed. Features are not normalised here.

    Args:
        z1: Features [N, D] of the first views.
        z2: Features [N, D] of the second views.
        temperature: A number, or a 0-d tensor that may need a gradient.
        return_stats: Return (loss, `BatchStats`) with top-1 accuracy, ranks and mean logits.
        group: "auto" (the default process group if one is initialised), None (this process alone) or a process group.
            Over several ranks the loss and its backward are collective: every rank calls both.
        reduction: "mean" over all 2N views, "sum" or "none" (the N values of z1, then those of z2). Over ranks "mean"
            is world_size / N_total times the local sum, so that DDP's average of gradients is the gradient of the
            global mean.
        backend: "auto", "torch" (tiles), "triton" (kernels on CUDA and ROCm) or "dense" (materialises the scores, for
            comparison). "auto" uses "triton" where it runs and covers the call.
        tile: Rows and columns of a tile. None chooses them from the caches and cores of the machine.
        cache_bytes: Memory that may be spent on keeping score tiles for the backward pass. Results do not change.
        precision: How fp32 features are multiplied on hardware with TF32: "ieee", "tf32x3" (kernels only) or "tf32".
            None follows `torch.get_float32_matmul_precision()`.
        ring: How blocks travel between ranks: "flat" (one ring), "nodes" (rings inside nodes, and links between equal
            places of the nodes) or "auto" ("nodes" if the group has several nodes of equal size).

    Returns:
        The loss in fp32 (fp64 for fp64 features), or (loss, BatchStats).

    Raises:
        ValueError: A shape or an option cannot be used.
        TypeError: An argument has the wrong type, dtype or device.

    Examples:
        >>> import torch, contratile as ct
        >>> z1, z2 = (torch.nn.functional.normalize(torch.randn(256, 32), dim=1) for _ in range(2))
        >>> loss, stats = ct.nt_xent(z1, z2, 0.5, return_stats=True)
    """
    spec = Spec(
        cols=False,
        exclude_self=True,
        ranks=return_stats,
        sums="all" if return_stats else "",
        backend=backend,
        tile=tile,
        cache_bytes=cache_bytes,
        precision=precision,
        ring=ring,
    )

    def check() -> None:
        check_pairs("z1 and z2", z1, z2)
        check_temperature(temperature)

    call = Call("nt_xent", {"z1": z1, "z2": z2}, {"temperature": temperature}, spec, reduction, views=2)
    keys = call.start(group, check).keys
    z = torch.cat([z1, z2])
    x = Inputs(z, None, 1 / as_tensor(temperature, z), labels=torch.arange(len(z), device=z.device).roll(len(z1)))
    stats = pair_stats(keys, x, spec)
    assert stats.pos is not None
    above = lse_above(stats.pos, stats.row)
    loss = call.reduce(above, stats, keys)
    if not return_stats:
        return loss
    rows = Tally(above, stats.row.sums, stats.row.counts, stats.row.higher)
    return loss, batch_stats(rows, None, stats, keys.team)


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
    ring: RingKind = "auto",
) -> Tensor:
    """The supervised contrastive loss: all other rows with an anchor's label are its positives. Replaces

        scores = z @ z.T / temperature
        log_prob = scores - scores.clone().fill_diagonal_(-inf).logsumexp(1, keepdim=True)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        return -((log_prob * positive).sum(1) / positive.sum(1))[positive.any(1)].mean()

    Features are not normalised here.

    SupContrast's `SupConLoss(temperature, contrast_mode="all", base_temperature)` of `features` [B, V, D] is

        z = torch.cat(features.unbind(1))
        loss = temperature / base_temperature * sup_con(z, labels.repeat(V), temperature, reduction="sum") / len(z)

    It multiplies by `temperature / base_temperature` (both 0.07 by default) and averages over all anchors: the same
    mean as here if each has a positive, as with two views. `contrast_mode="one"`, with anchors of the first view only,
    is the mean of the first B values of `reduction="none"`, times the same factor.

    Args:
        z: Features [N, D].
        labels: [N] integers; rows of equal label are positives of each other.
        temperature: A number, or a 0-d tensor that may need a gradient.
        group: "auto" (the default process group if one is initialised), None (this process alone) or a process group.
            Over several ranks the loss and its backward are collective: every rank calls both.
        reduction: "mean" over anchors that have a positive, "sum" or "none" (0 for an anchor without positive). Over
            ranks the mean of the returned values is the global mean.
        backend: "auto", "torch" (tiles), "triton" (kernels on CUDA and ROCm) or "dense" (materialises the scores, for
            comparison). "auto" uses "triton" where it runs and covers the call.
        tile: Rows and columns of a tile. None chooses them from the caches and cores of the machine.
        cache_bytes: Memory that may be spent on keeping score tiles for the backward pass. Results do not change.
        precision: How fp32 features are multiplied on hardware with TF32: "ieee", "tf32x3" (kernels only) or "tf32".
            None follows `torch.get_float32_matmul_precision()`.
        ring: How blocks travel between ranks: "flat" (one ring), "nodes" (rings inside nodes, and links between equal
            places of the nodes) or "auto" ("nodes" if the group has several nodes of equal size).

    Returns:
        The loss in fp32 (fp64 for fp64 features).

    Raises:
        ValueError: A shape or an option cannot be used.
        TypeError: An argument has the wrong type, dtype or device.

    Examples:
        >>> import torch, contratile as ct
        >>> z = torch.nn.functional.normalize(torch.randn(256, 32), dim=1)
        >>> loss = ct.sup_con(z, torch.arange(256) % 10)
    """
    spec = Spec(
        cols=False,
        exclude_self=True,
        backend=backend,
        tile=tile,
        cache_bytes=cache_bytes,
        precision=precision,
        ring=ring,
    )

    def check() -> None:
        check_vector("labels", labels, length=len(z), device=z.device)
        check_temperature(temperature)

    keys = Call("sup_con", {"z": z}, {"temperature": temperature}, spec, reduction).start(group, check).keys
    classes = labels.long()
    x = Inputs(z, None, 1 / as_tensor(temperature, z), query_classes=classes, key_classes=classes)
    per_anchor, count = class_losses(x, spec, keys)
    if reduction == "none":
        return per_anchor
    if reduction == "sum":
        return per_anchor.sum()
    anchors = keys.team.sum((count > 0).sum().to(per_anchor.dtype))
    return per_anchor.sum() * (keys.team.size / anchors.clamp(min=1))


@overload
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    return_stats: Literal[False] = False,
    **keywords: Unpack[SigLipKeywords],
) -> Tensor: ...
@overload
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    return_stats: Literal[True],
    **keywords: Unpack[SigLipKeywords],
) -> tuple[Tensor, BatchStats]: ...
@known_keywords
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Ids | None = None,
    same_id: SameId = "exclude",
    matryoshka_dims: Sequence[int] | None = None,
    matryoshka_weights: Sequence[float] | None = None,
    matryoshka_normalize: bool = True,
    return_stats: bool = False,
    group: Group = "auto",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
    precision: Precision | None = None,
    ring: RingKind = "auto",
) -> Tensor | tuple[Tensor, BatchStats]:
    """SigLIP's sigmoid loss, scaled as in open_clip. Replaces

        logits = scale * image @ text.T + bias
        return -F.logsigmoid((2 * torch.eye(n) - 1) * logits).sum() / n

    Features are not normalised here: pass normalised ones for cosine similarities.

    Args:
        image: Features [N, D].
        text: Features [N, D]; text i is the positive of image i.
        scale: The logit scale: a number, or a 0-d tensor that may need a gradient.
        bias: The logit bias: a number, or a 0-d tensor that may need a gradient.
        ids: Integers, one per pair, or (image_ids, text_ids): texts that share the image's id (duplicates, several
            captions of one image) are not its negatives.
        same_id: "exclude" drops pairs of equal id, except an image's own text. "positive" turns their sign: they are
            positives too.
        matryoshka_dims: Sum the loss over the first 64, 128, ... features of every row, in one product: numbers in any
            order, with or without all features. Not with return_stats or cache_bytes.
        matryoshka_weights: A weight for each of these losses; 1 each by default. The sum is not divided by them.
        matryoshka_normalize: Divide each truncated row by its norm, so that scores are cosines: with `matryoshka_dims`
            losses do normalise. False takes plain products.
        return_stats: Return (loss, `BatchStats`) with top-1 accuracy, ranks and mean logits.
        group: "auto" (the default process group if one is initialised), None (this process alone) or a process group.
            Over several ranks the loss and its backward are collective: every rank calls both.
        reduction: "mean", "sum" or "none" (one value per local image). Over ranks "mean" is world_size / N_total times
            the local sum, so that DDP's average of gradients is the gradient of the global mean.
        backend: "auto", "torch" (tiles), "triton" (kernels on CUDA and ROCm) or "dense" (materialises the scores, for
            comparison). "auto" uses "triton" where it runs and covers the call.
        tile: Rows and columns of a tile. None chooses them from the caches and cores of the machine.
        cache_bytes: Memory that may be spent on keeping score tiles for the backward pass. Results do not change.
        precision: How fp32 features are multiplied on hardware with TF32: "ieee", "tf32x3" (kernels only) or "tf32".
            None follows `torch.get_float32_matmul_precision()`.
        ring: How blocks travel between ranks: "flat" (one ring), "nodes" (rings inside nodes, and links between equal
            places of the nodes) or "auto" ("nodes" if the group has several nodes of equal size).

    Returns:
        The loss in fp32 (fp64 for fp64 features), or (loss, BatchStats).

    Raises:
        ValueError: A shape or an option cannot be used.
        TypeError: An argument has the wrong type, dtype or device.

    Examples:
        >>> import torch, contratile as ct
        >>> image, text = (torch.nn.functional.normalize(torch.randn(256, 32), dim=1) for _ in range(2))
        >>> loss = ct.siglip_loss(image, text, 10.0, -10.0)
    """
    options = PairOptions(
        *(ids, same_id),
        return_stats=return_stats,
        matryoshka_dims=matryoshka_dims,
        matryoshka_weights=matryoshka_weights,
        matryoshka_normalize=matryoshka_normalize,
    )
    spec = Spec(
        reduce="softplus",
        paired=True,
        cols=return_stats,
        ranks=return_stats,
        same_id=same_id,
        sums="" if not return_stats else "all" if ids is None else "same" if same_id == "positive" else "differ",
        col_sums=False,
        backend=backend,
        tile=tile,
        cache_bytes=cache_bytes,
        precision=precision,
        ring=ring,
    )

    def check() -> None:
        check_pairs("image and text", image, text)
        options.check(image, text, scale, spec)

    numbers = {"scale": scale, "bias": bias}
    call = Call("siglip_loss", {"image": image, "text": text}, numbers, spec, reduction, options)
    rings = call.start(group, check)
    shift = as_tensor(bias, image)
    labels = torch.arange(len(image), device=image.device)
    query_ids, key_ids = options.pair_of_ids
    nested = options.matryoshka
    if nested is not None:
        spec = nested.spec(spec)
    x = Inputs(image, text, as_tensor(scale, image), shift, labels=labels, query_ids=query_ids, key_ids=key_ids)
    stats = pair_stats(rings.keys, x, spec)
    assert stats.row.total is not None
    loss = call.reduce(stats.row.total if nested is None else nested.total(stats.row.total), stats, rings.keys)
    return (loss, sigmoid_stats(x, stats, options, rings)) if return_stats else loss
