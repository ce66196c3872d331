"""`nt_xent` and `sup_con`: losses of one set of views, each against all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import Inputs, Spec
from contratile.errors import check_pairs, check_temperature, check_vector
from contratile.keywords import known_keywords
from contratile.losses.batch_stats import BatchStats, Tally, batch_stats
from contratile.losses.call import Call
from contratile.losses.terms import as_tensor, class_losses, lse_above
from contratile.reference import Reduction
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from contratile.losses.signatures import Keywords


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
