"""`pair_lse`: log-sum-exps of rows and columns, for losses of your own."""

from __future__ import annotations

from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import Inputs, Spec
from contratile.keywords import known_keywords
from contratile.losses.call import Call
from contratile.losses.terms import as_tensor
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group


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
        (row_lse [N], col_lse [M]), natural logarithm, differentiable. A side that is not requested is empty.

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
