"""The kernels of the backward pass.

    side_weights      grad * 2^(shift - lse) of rows or columns, and whether a block's log-sum-exps are near the shift
    gradient_tiles    g = dL/ds of a chunk of scores, written for two library products         one program: one tile

    log-sum-exp   g = row_grad exp2(s - row_lse) + col_grad exp2(s - col_lse)
    softplus      g = (row_grad + col_grad) sigmoid(s)

`gradient_tiles` is launched twice, like `forward_tiles`:

    fast       Tiles without positives, excluded pairs and edges whose log-sum-exps are within 2^60 of a common shift:
               g = exp2(s - shift) * (row_weight + col_weight), one exponential for both sides.
    careful    All other tiles, by the formulas above. Excluded pairs have g = 0. A positive's g is a number per row
               that the host computed from the score which the forward pass read: late in training its terms almost
               cancel.
"""

# mypy: ignore-errors
# (Triton compiles these functions; they are not executed as Python.)

import triton
import triton.language as tl

from contratile.engine.backends.triton_tile import (
    LOWEST,
    is_special,
    nearest_tf32,
    negatives_of,
    rising,
    same_id,
    sigmoid,
    tile_of_dots,
    within,
)

SPAN = tl.constexpr(60.0)


@triton.jit
def whole_sum(
    x,
    DOWN: tl.constexpr,
    PAIR: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum of a tile: first of what one thread holds (`triton_forward.folded`; ACROSS warps lie side by side)."""
    apart = tl.reshape(x, [BLOCK_M // (8 * PAIR * DOWN), DOWN, PAIR, 8, BLOCK_N // (8 * ACROSS), ACROSS, 8])
    own = tl.sum(tl.sum(tl.sum(apart, 4), 2), 0)
    return tl.sum(tl.sum(tl.sum(tl.sum(own, 3), 2), 1), 0)


@triton.jit(do_not_specialize=["N"])
def side_weights(lse, grad, shift, weight, far, N, BLOCK: tl.constexpr):
    """The weights of a block of rows, or of columns."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    common = tl.load(shift)
    above = common - tl.load(lse + at, mask=at < N, other=0.0)
    above = tl.where(at < N, above, 0.0)
    tl.store(weight + at, tl.load(grad + at, mask=at < N, other=0.0) * tl.exp2(above), mask=at < N)
    near = tl.max(tl.abs(above), 0) <= SPAN
    tl.store(far + tl.program_id(0), (~near).to(tl.int32))


@triton.jit(
    do_not_specialize=["first_row", "rows_end", "first_col", "cols_end", "cached_rows", "M", "depth", "first_sum"]
)
def gradient_tiles(
    query,  # [N, D]
    key,  # [M, D]
    alpha,  # 0-d
    row_alpha,  # 0-d: the factor of the negatives' scores that rows read, if it is not alpha
    bias,  # 0-d
    col_bias,  # [M]
    labels,  # [N]
    label_low,  # [row blocks]
    label_high,
    query_ids,  # [N]
    key_ids,  # [M]
    block_ids,  # [column blocks, BLOCK_N]: sorted hashes of the ids of a block
    query_classes,  # [N]
    key_classes,  # [M]
    row_lse,  # [N]
    row_grad,
    row_weight,
    row_far,  # [row blocks]
    row_limit,  # [N]
    row_sums_grad,
    col_lse,  # [M]
    col_grad,
    col_weight,
    col_far,  # [column blocks]
    col_limit,  # [M]
    col_sums_grad,
    shift,  # 0-d
    pos_weight,  # [N]
    cache,  # [cached_rows, M]
    grad,  # [rows, cols] of the chunk, in whole tiles
    sums,  # [programs of both launches, 2]: of g * dots and of g, over negatives
    special,  # [programs of the fast launch]: tiles that the fast launch leaves to the careful one
    M,
    D,
    cached_rows,
    first_row,  # the chunk: rows from here
    rows_end,
    first_col,
    cols_end,
    grad_row,
    depth,  # row blocks of a group of the fast launch
    first_sum,  # where the sums of the careful launch begin
    q_row,
    q_col,
    k_row,
    k_col,
    CAREFUL: tl.constexpr,
    RISING: tl.constexpr,  # products change their sign with a negative alpha
    SOFTPLUS: tl.constexpr,
    SELF: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    MORE: tl.constexpr,  # pairs of equal id are positives too
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    DOWN: tl.constexpr,
    PAIR: tl.constexpr,
    ACROSS: tl.constexpr,
    TILE_M: tl.constexpr,  # rows of a tile of the fast launch, a multiple of BLOCK_M
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """g of one tile, from its scores computed again or kept by the forward pass."""
    if CAREFUL:  # `tile` is the fast program that covers this one
        program = first_sum + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        down = tl.program_id(0) * BLOCK_M
        high = down // TILE_M
        tile = (high // depth * tl.num_programs(1) + tl.program_id(1)) * depth + high % depth
    else:
        # The first axis of the grid is the fastest: programs walk down a group of row blocks before moving to the next
        # columns, so that both stay in the L2 cache.
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        down = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * BLOCK_M
        tile = program
    across = tl.program_id(1) * BLOCK_N
    top = tl.multiple_of(first_row, BLOCK_M) + down
    left = tl.multiple_of(first_col, BLOCK_N) + across
    if top >= rows_end:
        return
    row = top + tl.arange(0, BLOCK_M)
    col = left + tl.arange(0, BLOCK_N)
    at_row, at_col = row, col
    if CAREFUL:
        at_row = tl.minimum(row, rows_end - 1)
        at_col = tl.minimum(col, cols_end - 1)
    factor = tl.load(alpha)
    size = factor
    if CAREFUL:
        if tl.load(special + tile) == 0:
            return
    else:
        odd = is_special(
            labels,
            label_low,
            label_high,
            query_ids,
            block_ids,
            tl.minimum(row, rows_end - 1),
            tl.minimum(col, cols_end - 1),
            top,
            left,
            rows_end,
            cols_end,
            SELF,
            SYMMETRIC,
            BLOCK_M,
            BLOCK_N,
        )
        if row_far is not None:
            odd |= tl.load(row_far + top // BLOCK_M) | tl.load(col_far + left // BLOCK_N)
        tl.store(special + tile, odd)
        if odd != 0:
            return
    if cache is None:
        dots = tile_of_dots(
            query, key, at_row, at_col, D, q_row, q_col, k_row, k_col, PRECISION, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D
        )
    elif top + BLOCK_M <= cached_rows:
        dots = tl.load(cache + at_row.to(tl.int64)[:, None] * M + at_col[None, :])
    else:
        dots = tile_of_dots(
            query, key, at_row, at_col, D, q_row, q_col, k_row, k_col, PRECISION, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D
        )
    if RISING:
        dots, size = rising(dots, factor)
    there = within(row, col, rows_end, cols_end, SELF)
    if CAREFUL:  # a number, not -inf: 0 * -inf would be NaN in the sums
        excluded = query_ids
        if MORE:
            excluded = None
            more = same_id(there, col, at_row, at_col, labels, query_ids, key_ids)
        dots = negatives_of(dots, LOWEST, there, row, col, at_row, at_col, labels, excluded, key_ids, SYMMETRIC)
    if SOFTPLUS:
        s = dots * size
        if bias is not None:
            s += tl.load(bias)
        if CAREFUL and MORE:
            g = sigmoid(tl.where(more, -s, s))
            g = tl.where(more, -g, g)
        else:
            g = sigmoid(s)
        if row_grad is not None and col_grad is not None:
            g = g * (tl.load(row_grad + at_row)[:, None] + tl.load(col_grad + at_col)[None, :])
        elif row_grad is not None:
            g = g * tl.load(row_grad + at_row)[:, None]
        elif col_grad is not None:
            g = g * tl.load(col_grad + at_col)[None, :]
    elif row_far is not None and not CAREFUL:
        if col_bias is not None:
            e = tl.exp2(dots * size + (tl.load(col_bias + at_col) - tl.load(shift))[None, :])
        else:
            e = tl.exp2(dots * size - tl.load(shift))
        # Addresses with a common start: a thread reads its columns at constant distances.
        of_rows = tl.load((row_weight + top) + tl.arange(0, BLOCK_M))
        of_cols = tl.load((col_weight + left) + tl.arange(0, BLOCK_N))
        g = e * (of_rows[:, None] + of_cols[None, :])
    else:
        g = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        s = dots * size
        if col_bias is not None:
            s += tl.load(col_bias + at_col)[None, :]
        if row_grad is not None:
            read = s
            if row_alpha is not None:
                read = dots * tl.load(row_alpha)
                if col_bias is not None:
                    read += tl.load(col_bias + at_col)[None, :]
            share = tl.load(row_grad + at_row)[:, None] * tl.exp2(read - tl.load(row_lse + at_row)[:, None])
            if row_limit is not None:
                share = tl.where(dots <= tl.load(row_limit + at_row)[:, None], share, 0.0)
            g += share
        if col_grad is not None:
            share = tl.load(col_grad + at_col)[None, :] * tl.exp2(s - tl.load(col_lse + at_col)[None, :])
            if col_limit is not None:
                share = tl.where(dots <= tl.load(col_limit + at_col)[None, :], share, 0.0)
            g += share
    if CAREFUL:  # a tiny scale, or an empty log-sum-exp, could give excluded pairs a weight
        g = tl.where(dots == LOWEST, 0.0, g)
    if sums is not None:
        weighed = whole_sum(g * dots, DOWN, PAIR, ACROSS, BLOCK_M, BLOCK_N)
        if RISING:
            weighed = tl.where(factor < 0, -weighed, weighed)
        tl.store(sums + program * 2, weighed)
        if bias is not None:
            tl.store(sums + program * 2 + 1, whole_sum(g, DOWN, PAIR, ACROSS, BLOCK_M, BLOCK_N))
    if CAREFUL and pos_weight is not None:
        label = tl.where(row < rows_end, tl.load(labels + at_row), -1)
        g = tl.where(col[None, :] == label[:, None], tl.load(pos_weight + at_row)[:, None], g)
        if SYMMETRIC:
            label = tl.where(col < cols_end, tl.load(labels + at_col), -1)
            g = tl.where(row[:, None] == label[None, :], tl.load(pos_weight + at_col)[None, :], g)
    if SUMS != "" and (CAREFUL or SUMS != "same"):
        summed = there
        if SUMS == "equal":
            summed = there & (tl.load(query_classes + at_row)[:, None] == tl.load(key_classes + at_col)[None, :])
        elif SUMS == "differ":
            summed = there & (tl.load(query_ids + at_row)[:, None] != tl.load(key_ids + at_col)[None, :])
        elif SUMS == "same":
            summed = more
        if row_sums_grad is not None:
            g += tl.where(summed, tl.load(row_sums_grad + at_row)[:, None], 0.0)
        if col_sums_grad is not None:
            g += tl.where(summed, tl.load(col_sums_grad + at_col)[None, :], 0.0)
    if grad is not None:
        if PRECISION == "tf32":
            g = nearest_tf32(g)
        place = (down + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None] * grad_row + (across + tl.arange(0, BLOCK_N))[
            None, :
        ]
        tl.store(grad + place, g.to(grad.dtype.element_ty))
