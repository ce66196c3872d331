"""What the kernels share: the products of a tile, and which of its pairs count.

    s_ij = alpha <q_i, k_j> + bias        alpha = scale * log2(e), or the scale itself where softplus is summed

Rows and columns beyond the end repeat the last one and are masked out of every result. Offsets into features are 64
bit.
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
    q_at = query + at_row.to(tl.int64)[:, None] * q_row + wide[None, :] * q_col
    k_at = key + at_col.to(tl.int64)[:, None] * k_row + wide[None, :] * k_col
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
def rising(dots, factor):
    """The products, negated if the factor is negative: a higher one is then a higher score. And the factor for them."""
    return dots * tl.where(factor < 0, -1.0, 1.0), tl.abs(factor)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def any_of(flags):
    """Whether a flag of a tile is set: 1 or 0."""
    return tl.reduce(tl.reduce(flags, 1, either), 0, either).to(tl.int32)


@triton.jit
def hashed(ids):
    """32 bits of ids: equal for equal ids."""
    return (ids ^ (ids >> 32)).to(tl.int32)


@triton.jit
def may_be_equal(left, right, LENGTH: tl.constexpr):
    """Whether an id on the left [rows] may be among those on the right: 1 or 0.

    `right` points to the sorted hashes of a block of LENGTH ids, in which every row looks its own up.
    """
    wanted = hashed(left)
    at = tl.zeros_like(wanted)
    for halving in tl.static_range(1, 9):
        if LENGTH >> halving > 0:
            at = tl.where(tl.load(right + at + (LENGTH >> halving) - 1) < wanted, at + (LENGTH >> halving), at)
    return tl.reduce(tl.load(right + at) == wanted, 0, either).to(tl.int32)


@triton.jit
def holds_positive(labels, label_low, label_high, block, at, start, width):
    """Whether a label of a block lies in [start, start + width): 1 or 0. `label_low`, `label_high` bound its labels."""
    found = tl.full([], 0, tl.int32)
    if (tl.load(label_low + block) < start + width) & (tl.load(label_high + block) >= start):
        label = tl.load(labels + at)
        found = tl.reduce((label >= start) & (label < start + width), 0, either).to(tl.int32)
    return found


@triton.jit
def is_special(
    labels,
    label_low,
    label_high,
    query_ids,
    block_ids,
    at_row,
    at_col,
    top,
    left,
    N,
    M,
    SELF: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Whether a tile reaches beyond the matrix, or holds a positive or an excluded pair: not 0 if so."""
    special = (top + BLOCK_M > N).to(tl.int32) | (left + BLOCK_N > M).to(tl.int32)
    if SELF:
        special |= ((top < left + BLOCK_N) & (left < top + BLOCK_M)).to(tl.int32)
    if labels is not None:
        special |= holds_positive(labels, label_low, label_high, top // BLOCK_M, at_row, left, BLOCK_N)
        if SYMMETRIC:  # square tiles
            special |= holds_positive(labels, label_low, label_high, left // BLOCK_N, at_col, top, BLOCK_M)
    if query_ids is not None:
        if special == 0:
            special = may_be_equal(tl.load(query_ids + at_row), block_ids + left // BLOCK_N * BLOCK_N, BLOCK_N)
    return special


@triton.jit
def within(row, col, rows_end, cols_end, SELF: tl.constexpr):
    """The pairs of a tile that exist, without selves."""
    there = (row < rows_end)[:, None] & (col < cols_end)[None, :]
    if SELF:
        there = there & (row[:, None] != col[None, :])
    return there


@triton.jit
def same_id(there, col, at_row, at_col, labels, query_ids, key_ids):
    """The pairs of equal id that exist, without the labelled ones."""
    same = there & (tl.load(query_ids + at_row)[:, None] == tl.load(key_ids + at_col)[None, :])
    if labels is not None:
        same = same & (tl.load(labels + at_row)[:, None] != col[None, :])
    return same


@triton.jit
def negatives_of(x, nothing, there, row, col, at_row, at_col, labels, query_ids, key_ids, SYMMETRIC: tl.constexpr):
    """x, or `nothing` at pairs that do not exist, that are positive, or that have equal ids."""
    x = tl.where(there, x, nothing)
    if labels is not None:
        x = tl.where(tl.load(labels + at_row)[:, None] != col[None, :], x, nothing)
        if SYMMETRIC:
            x = tl.where(tl.load(labels + at_col)[None, :] != row[:, None], x, nothing)
    if query_ids is not None:
        x = tl.where(tl.load(query_ids + at_row)[:, None] != tl.load(key_ids + at_col)[None, :], x, nothing)
    return x


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
