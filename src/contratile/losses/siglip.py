"""`siglip_loss`: the sigmoid loss of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import Inputs, SameId, Spec
from contratile.errors import check_pairs
from contratile.keywords import known_keywords
from contratile.losses.batch_stats import BatchStats, sigmoid_stats
from contratile.losses.call import Call
from contratile.losses.options import Ids, PairOptions
from contratile.losses.terms import as_tensor
from contratile.reference import Reduction
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from contratile.losses.signatures import SigLipKeywords


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
        same_id: "exclude" drops pairs of equal id, except an image's own text. "positive" makes them positives too.
        matryoshka_dims: Sum the loss over the first 64, 128, ... features of every row, in one product: numbers in any
            order, with or without all features. Not with return_stats or cache_bytes.
        matryoshka_weights: A weight for each of these losses; 1 each by default. The sum is not divided by them.
        matryoshka_normalize: Divide each truncated row by its norm, so that scores are cosines. False uses plain
            products.
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
        ids=ids,
        same_id=same_id,
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
