"""The kernels: a tile of scores is computed and reduced inside one program, and never stored.

    forward_tiles     statistics of rows and columns, and the positives' scores         one program: a row of tiles
    merge_parts       the programs' statistics into running ones                        one program: some columns
    gradient_tiles    g = dL/ds of a chunk of scores, written for two library products  one program: one tile

All work on the same scores, in base 2 where they are exponentiated:

    s_ij = alpha <q_i, k_j> + bias        alpha = scale * log2(e), or the scale itself where softplus is summed

Arguments that are None are absent at compile time. N, M and D may be any size: rows and columns beyond the end repeat
the last one and are masked out of every result. Offsets into features are 64 bit. No two programs write to the same
place, so results do not depend on the order of programs.
"""

# mypy: ignore-errors
# (Triton compiles these functions; they are not executed as Python.)

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # `stats.lowest`: the level of empty statistics
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def nearest_tf32(x):
    """fp32 rounded to the nearest TF32. The hardware truncates 13 bits, which would make every score too small."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # rounding the bits of a NaN may give a number


@triton.jit
def tile_of_dots(
    query,
    key,
    at_row,
    at_col,
    D,
    q_row,
    q_col,
    k_row,
    k_col,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """<q_i, k_j> for rows and columns that exist, in fp32."""
    d = tl.arange(0, BLOCK_D)
    wide = d.to(tl.int64)
    q_at = query + at_row[:, None] * q_row + wide[None, :] * q_col
    k_at = key + at_col[:, None] * k_row + wide[None, :] * k_col
    step = tl.full([], BLOCK_D, tl.int64)
    dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_D):
        if EVEN_D:
            q = tl.load(q_at)
            k = tl.load(k_at)
        else:
            q = tl.load(q_at, mask=d[None, :] < D - start, other=0.0)
            k = tl.load(k_at, mask=d[None, :] < D - start, other=0.0)
        if PRECISION == "tf32":
            q = nearest_tf32(q)
            k = nearest_tf32(k)
        dots = tl.dot(q, tl.trans(k), dots, input_precision=PRECISION)
        q_at += step * q_col
        k_at += step * k_col
    return dots


@triton.jit
def counted_pairs(row, col, at_row, at_col, rows_end, cols_end, positive, query_ids, key_ids, SELF: tl.constexpr):
    """Which pairs of a tile count: those within bounds, without selves and pairs of equal id (unless positive)."""
    counted = (row < rows_end)[:, None] & (col < cols_end)[None, :]
    if query_ids is not None:
        same = tl.load(query_ids + at_row)[:, None] == tl.load(key_ids + at_col)[None, :]
        if positive is not None:
            same = same & ~positive
        counted = counted & ~same
    if SELF:
        counted = counted & (row[:, None] != col[None, :])
    return counted


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate for small exp(x) too."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e * (1 / 5 - e * (1 / 6))))))
    return tl.maximum(x, 0.0) + tl.where(e < 0.0625, series, tl.log2(1 + e) * LN2)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    return tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit(do_not_specialize=["M", "N", "first", "span", "part_rows"])
def forward_tiles(
    query,  # [N, D]
    key,  # [M, D]
    alpha,  # 0-d
    bias,  # 0-d
    labels,  # [N]
    query_ids,  # [N]
    key_ids,  # [M]
    row_level,  # [splits, part_rows]
    row_total,
    col_level,  # [row blocks, M]
    col_total,
    pos,  # [N]
    N,
    M,
    D,
    first,  # the first row block of this launch
    span,  # columns of a split, a multiple of BLOCK_N
    part_rows,
    q_row,
    q_col,
    k_row,
    k_col,
    SOFTPLUS: tl.constexpr,
    SELF: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of rows against a split of the columns, every tile once.

    Row statistics are accumulated over the tiles; column statistics are stored per row block. For symmetric scores,
    tiles start at the diagonal, and a tile right of it adds its column statistics to the mirrored rows. BLOCK_M is a
    multiple of BLOCK_N.
    """
    height = first * BLOCK_M + tl.program_id(0) * BLOCK_M
    row = height + tl.arange(0, BLOCK_M)
    at_row = tl.minimum(row, N - 1).to(tl.int64)
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, M)
    if SYMMETRIC:
        begin = tl.maximum(begin, height)
    factor = tl.load(alpha)
    level = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if labels is not None:
        label = tl.load(labels + at_row).to(tl.int32)
        lowest = tl.min(label, 0)
        highest = tl.max(label, 0)
        own = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        at_col = tl.minimum(col, M - 1).to(tl.int64)
        dots = tile_of_dots(
            query, key, at_row, at_col, D, q_row, q_col, k_row, k_col, PRECISION, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D
        )
        s = dots * factor
        if bias is not None:
            s += tl.load(bias)
        positive = None
        if labels is not None:
            positive = col[None, :] == label[:, None]
            if (lowest < start + BLOCK_N) & (highest >= start):
                own += tl.sum(tl.where(positive, s, 0.0), 1)
            if SYMMETRIC:
                if start >= height + BLOCK_M:
                    other = tl.load(labels + at_col).to(tl.int32)
                    here = (other >= height) & (other < height + BLOCK_M) & (col < M)
                    mirrored = tl.sum(tl.where(other[None, :] == row[:, None], s, 0.0), 0)
                    tl.store(pos + col, mirrored, mask=here)
        counted = counted_pairs(row, col, at_row, at_col, N, M, positive, query_ids, key_ids, SELF)
        part = tl.program_id(0).to(tl.int64) * M + col
        stored = col < M
        if SYMMETRIC:
            stored = stored & (col >= height + BLOCK_M)
        if SOFTPLUS:
            if labels is not None:
                s = tl.where(positive, -s, s)
            value = tl.where(counted, softplus(s), 0.0)
            total += tl.sum(value, 1)
            if col_total is not None:
                tl.store(col_total + part, tl.sum(value, 0), mask=stored)
        else:
            s = tl.where(counted, s, float("-inf"))
            if col_total is not None:
                top = tl.maximum(tl.max(s, 0), LOWEST)
                tl.store(col_level + part, top, mask=stored)
                tl.store(col_total + part, tl.sum(tl.exp2(s - top[None, :]), 0), mask=stored)
            if row_total is not None:
                top = tl.maximum(level, tl.max(s, 1))
                total = total * tl.exp2(level - top) + tl.sum(tl.exp2(s - top[:, None]), 1)
                level = top
    if row_total is not None:
        part = tl.program_id(1).to(tl.int64) * part_rows + (row - first * BLOCK_M)
        if not SOFTPLUS:
            tl.store(row_level + part, level, mask=row < N)
        tl.store(row_total + part, total, mask=row < N)
    if labels is not None:
        tl.store(pos + row, own, mask=(row < N) & (label >= begin) & (label < end))


@triton.jit(do_not_specialize=["parts", "count", "stride", "first"])
def merge_parts(
    level,  # [count]
    total,
    part_level,  # [parts, stride]
    part_total,
    parts,
    count,
    stride,
    first,
    TRIANGLE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge partial statistics into running ones, like `Stats.merge_`. Without levels they are plain sums.

    TRIANGLE, if it is not 0, is the height of a row block of symmetric scores: part p comes from row block `first + p`
    and exists only for columns to the right of its diagonal tile.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    sums = tl.load(total + at, mask=there, other=0.0)
    if level is not None:
        top = tl.load(level + at, mask=there, other=LOWEST)
    for start in range(0, parts, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < parts)[:, None] & there[None, :]
        if TRIANGLE > 0:
            mask = mask & ((at // TRIANGLE)[None, :] > first + p[:, None])
        place = p.to(tl.int64)[:, None] * stride + at[None, :]
        more = tl.load(part_total + place, mask=mask, other=0.0)
        if level is None:
            sums += tl.sum(more, 0)
        else:
            tops = tl.load(part_level + place, mask=mask, other=LOWEST)
            highest = tl.maximum(top, tl.max(tops, 0))
            sums = sums * tl.exp2(top - highest) + tl.sum(more * tl.exp2(tops - highest[None, :]), 0)
            top = highest
    tl.store(total + at, sums, mask=there)
    if level is not None:
        tl.store(level + at, top, mask=there)


@triton.jit(do_not_specialize=["first_row", "rows_end", "first_col", "cols_end"])
def gradient_tiles(
    query,  # [N, D]
    key,  # [M, D]
    alpha,  # 0-d
    bias,  # 0-d
    labels,  # [N]
    query_ids,  # [N]
    key_ids,  # [M]
    row_lse,  # [N]
    row_grad,
    col_lse,  # [M]
    col_grad,
    pos,  # [N]
    pos_grad,
    grad,  # [rows, cols] of the chunk, in whole tiles
    sums,  # [programs, 2]: of g <q, k>, times alpha if there is no bias, and of g
    D,
    first_row,  # the chunk: rows from here
    rows_end,
    first_col,
    cols_end,
    grad_row,
    q_row,
    q_col,
    k_row,
    k_col,
    SOFTPLUS: tl.constexpr,
    SELF: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """g of one tile, from its scores computed again.

        log-sum-exp   g = row_grad exp2(s - row_lse) + col_grad exp2(s - col_lse)
        softplus      g = (row_grad + col_grad) sigmoid(s), or -(row_grad + col_grad) sigmoid(-s) at positives

    plus pos_grad at positives. Their scores are those that the forward pass read, because late in training the two
    terms almost cancel. For symmetric scores, columns have positives of their own.
    """
    # Programs walk down a group of row blocks before moving to the next columns, so that both stay in the L2 cache.
    row_blocks = tl.cdiv(rows_end - first_row, BLOCK_M)
    col_blocks = tl.cdiv(cols_end - first_col, BLOCK_N)
    group = tl.program_id(0) // (GROUP * col_blocks)
    within = tl.program_id(0) % (GROUP * col_blocks)
    depth = tl.minimum(row_blocks - group * GROUP, GROUP)
    down = (group * GROUP + within % depth) * BLOCK_M + tl.arange(0, BLOCK_M)
    across = (within // depth) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, col = first_row + down, first_col + across
    at_row = tl.minimum(row, rows_end - 1).to(tl.int64)
    at_col = tl.minimum(col, cols_end - 1).to(tl.int64)
    dots = tile_of_dots(
        query, key, at_row, at_col, D, q_row, q_col, k_row, k_col, PRECISION, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D
    )
    s = dots * tl.load(alpha)
    if bias is not None:
        s += tl.load(bias)
    positive = None
    if labels is not None:
        label = tl.load(labels + at_row).to(tl.int32)
        positive = col[None, :] == tl.where(row < rows_end, label, -1)[:, None]
        s = tl.where(positive, tl.load(pos + at_row)[:, None], s)
        if SYMMETRIC:
            other = tl.load(labels + at_col).to(tl.int32)
            mirrored = row[:, None] == tl.where(col < cols_end, other, -1)[None, :]
            s = tl.where(mirrored, tl.load(pos + at_col)[None, :], s)
    counted = counted_pairs(row, col, at_row, at_col, rows_end, cols_end, positive, query_ids, key_ids, SELF)
    g = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SOFTPLUS:
        if row_grad is not None:
            g += tl.load(row_grad + at_row)[:, None]
        if col_grad is not None:
            g += tl.load(col_grad + at_col)[None, :]
        if labels is not None:
            g = tl.where(positive, -g, g) * sigmoid(tl.where(positive, -s, s))
        else:
            g = g * sigmoid(s)
    else:
        if row_grad is not None:
            g += tl.load(row_grad + at_row)[:, None] * tl.exp2(s - tl.load(row_lse + at_row)[:, None])
        if col_grad is not None:
            g += tl.load(col_grad + at_col)[None, :] * tl.exp2(s - tl.load(col_lse + at_col)[None, :])
    g = tl.where(counted, g, 0.0)  # masked pairs may hold anything, even infinity
    if pos_grad is not None:
        g += tl.where(positive, tl.load(pos_grad + at_row)[:, None], 0.0)
        if SYMMETRIC:
            g += tl.where(mirrored, tl.load(pos_grad + at_col)[None, :], 0.0)
    if sums is not None:
        if bias is None:  # scores are alpha times the dots, so the dots need not be kept
            dots = s
        tl.store(sums + tl.program_id(0) * 2, tl.sum(g * dots))
        tl.store(sums + tl.program_id(0) * 2 + 1, tl.sum(g))
    if grad is not None:
        if PRECISION == "tf32":
            g = nearest_tf32(g)
        place = down.to(tl.int64)[:, None] * grad_row + across[None, :]
        tl.store(grad + place, g.to(grad.dtype.element_ty))
