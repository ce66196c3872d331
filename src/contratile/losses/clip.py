"""`clip_loss`: the symmetric loss of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import GuideMargin, SameId, Spec
from contratile.errors import check_pairs
from contratile.keywords import known_keywords
from contratile.losses.batch_stats import BatchStats
from contratile.losses.beside import Guide, LossTerms, Teacher
from contratile.losses.call import Call
from contratile.losses.cross_entropy import cross_entropies, loss_and_extras
from contratile.losses.options import Ids, PairOptions
from contratile.reference import Reduction
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from contratile.losses.signatures import PairKeywords


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
            directions, as in SupCon. Not with margin or label_smoothing.
        extra_keys: [E, D] more texts, negatives of all images: a queue, mined negatives. Each rank passes its own;
            all images of all ranks are compared with all of them.
        extra_ids: [E] ids of the extra keys, compared with the ids of the images.
        hard_negatives: [N, H, D] texts that are negatives of one image each.
        hard_mask: [N, H] bool, False where a hard negative is padding.
        key_bias: [N] numbers added to the scaled scores of each text, with a gradient if they need one. -log q, where q
            is how often a text occurs in batches, corrects for that (logQ). It cancels in the text-to-image direction.
            Statistics and margins ignore biases.
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
        matryoshka_normalize: Divide each truncated row by its norm, so that scores are cosines. False uses plain
            products.
        teacher: (image [N, T], text [N, T], scale) of a frozen model. Adds the distillation term of open_clip's
            DistillClipLoss in both directions. With S = scale * image @ text.T:

                target = (teacher_scale / teacher_temperature * teacher_image @ teacher_text.T).softmax(1)
                distill = -(target * S.log_softmax(1)).sum(1)
                loss = contrastive + teacher_weight * distill

            The teacher gets no gradient. Not with extra keys, hard negatives, margin, smoothing or several positives.
        teacher_weight: Factor of that term.
        teacher_temperature: Divides the teacher's scores, not the student's: above 1 its targets are softer.
        guide: (image [N, G], text [N, G]) of a frozen model that removes false negatives, as GISTEmbed does: pairs that
            it finds more similar than the positive are dropped. Each direction uses its own positives.
        guide_margin: Drop pairs whose guide similarity exceeds the positive's minus this margin.
        guide_margin_strategy: "absolute", or "relative": the positive's minus margin * abs(positive's).
        extra_guide: [E, G] the guide's features of the extra keys.
        hard_guide: [N, H, G] the guide's features of the hard negatives.
        return_stats: Return (loss, `BatchStats`) with top-1 accuracy, ranks and mean logits.
        return_terms: Return (loss, `LossTerms`): the contrastive and the distillation term. With `return_stats` too:
            (loss, terms, statistics).
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
        ids=ids,
        same_id=same_id,
        extra_keys=extra_keys,
        extra_ids=extra_ids,
        hard_negatives=hard_negatives,
        hard_mask=hard_mask,
        key_bias=key_bias,
        extra_bias=extra_bias,
        hard_bias=hard_bias,
        margin=margin,
        label_smoothing=label_smoothing,
        weights=weights,
        matryoshka_dims=matryoshka_dims,
        matryoshka_weights=matryoshka_weights,
        matryoshka_normalize=matryoshka_normalize,
        return_stats=return_stats,
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
    return loss_and_extras(call, losses, rings, share=0.5)
