"""How much memory a loss needs beyond features and their gradients: tiled, and dense for comparison.

    tiled_loss_bytes(4096, 512)           # Contratile's loss
    dense_loss_bytes(4096)                # a loss that holds all scores at once

Both are computed, not measured. `contratile bench loss` measures them.
"""

from contratile.engine.plan import plan_tiles

DENSE_MATRICES = 4
"""N x N matrices in fp32 that a dense loss holds at its peak, as measured by `contratile bench loss`."""

_FP32 = 4


def dense_loss_bytes(pairs: int, *, views: int = 1, negatives: int = 0) -> int:
    """Memory of a dense loss: all scores, their exponentials and their gradients at once.

    Args:
        pairs: Pairs in the global batch.
        views: 2 if both sides of a pair are compared with everything (NT-Xent, SupCon), else 1.
        negatives: Hard negatives of each pair that all pairs are compared with.
    """
    return DENSE_MATRICES * _FP32 * (views * pairs) ** 2 * (1 + negatives)


def tiled_loss_bytes(
    pairs: int,
    width: int,
    *,
    processes: int = 1,
    views: int = 1,
    negatives: int = 0,
    cache_bytes: int = 0,
    second: int = 0,
) -> int:
    """Memory of contratile's loss on one process: tile workspace, statistics, key gradient and score cache.

    Args:
        pairs: Pairs in the global batch.
        width: Size of a feature.
        processes: Processes that share the batch. With several, two visiting key blocks are counted too.
        views: 2 if both sides of a pair are compared with everything (NT-Xent, SupCon), else 1.
        negatives: Hard negatives of each pair that all pairs are compared with.
        cache_bytes: What may be spent on keeping score tiles from forward to backward.
        second: Size of a feature of a guide or a teacher; 0: there is none.
    """
    rows = views * -(-pairs // processes)
    tiles = plan_tiles(rows, rows, width, symmetric=views == 2)
    workspace = tiles.workspace_bytes
    statistics = 3 * rows * _FP32  # log-sum-exps of rows and columns, positive scores
    block = rows * width * _FP32
    visiting = 2 * block if processes > 1 else 0
    cached = min(cache_bytes, (1 + negatives) * rows * rows * _FP32)
    if second:  # its products of a tile, and what they say; two visiting blocks of its features
        workspace += 2 * tiles.rows * tiles.cols * _FP32
        visiting += 2 * rows * second * _FP32 if processes > 1 else 0
    return workspace + statistics + (1 + negatives) * (block + visiting) + cached
