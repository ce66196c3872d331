"""The kernels of the forward pass: a tile of scores is computed and reduced inside one program, and never stored.

    label_bounds        lowest and highest label of each row block
    positive_products   <q, k> of each row and its positive, from the tiles that hold one
    forward_tiles       statistics of rows and columns; one program takes a column block, tile after tile
    merge_parts         the programs' statistics into running ones

Tiles sum over negatives; the N positives are added afterwards, exactly. `forward_tiles` is launched twice:

    fast       Tiles inside the matrix without positives and excluded pairs. One exp2(s - shift), without masks, serves
               rows and columns; the shift is the maximum of the program's first such tile. Sums between 2^-80 and 2^100
               are right: what underflowed is too small to matter. A program that finds another sum is marked, and its
               results do not count.
    careful    All other tiles, and those of marked programs: masks, and an exponential for each side, shifted by its
               own maxima.

The host never learns which tiles were which. Column sums of the fast launch stay in registers and are added across
threads once per program (`folded`). No two programs of a launch write to the same place, so results do not depend on
the order of programs. Arguments that are None are absent at compile time.
"""

# mypy: ignore-errors
# (Triton compiles these functions; they are not executed as Python.)

import triton
import triton.language as tl

from contratile.engine.backends.triton_tile import (
    LOWEST,
    any_of,
    either,
    is_special,
    negatives_of,
    rising,
    same_id,
    softplus,
    tile_of_dots,
    within,
)

LEAST = tl.constexpr(2.0**-80)
MOST = tl.constexpr(2.0**100)


@triton.jit
def folded(x, DOWN: tl.constexpr, PAIR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum the rows of a tile that one thread holds: [BLOCK_M, BLOCK_N] becomes [DOWN, 8, BLOCK_N].

    In a product of tensor cores a thread has rows 8 apart in pairs (PAIR = 2), and again every 16 * DOWN rows, where
    DOWN warps lie below each other. With other layouts the sums are the same, and threads exchange more.
    """
    apart = tl.reshape(x, [BLOCK_M // (8 * PAIR * DOWN), DOWN, PAIR, 8, BLOCK_N])
    return tl.sum(tl.sum(apart, 2), 0)


@triton.jit
def unfolded(x):
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def out_of_range(found, DOWN: tl.constexpr, PAIR: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether a sum of the rows that one thread holds is out of range: [DOWN, 8]."""
    bad = tl.reshape((found < LEAST) | (found > MOST), [BLOCK_M // (8 * PAIR * DOWN), DOWN, PAIR, 8])
    return tl.reduce(tl.reduce(bad, 2, either), 0, either)


@triton.jit
def number_of(flags):
    return flags.to(tl.float32)


@triton.jit
def dropped_above(x, dots, limit, nothing):
    """x, or `nothing` where the product is above the limit of its row or column."""
    kept = x
    if limit is not None:
        kept = tl.where(dots <= limit, x, nothing)
    return kept


@triton.jit(do_not_specialize=["N"])
def label_bounds(labels, low, high, N, BLOCK: tl.constexpr):
    """The lowest and the highest label of a block of rows."""
    at = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), N - 1)
    label = tl.load(labels + at)
    tl.store(low + tl.program_id(0), tl.min(label, 0))
    tl.store(high + tl.program_id(0), tl.max(label, 0))


@triton.jit(do_not_specialize=["M", "N"])
def positive_products(
    query,  # [N, D]
    key,  # [M, D]
    alpha,  # 0-d
    labels,  # [N]
    level,  # [N]
    N,
    M,
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
    """<q_i, k_label> of a block of rows, negated if alpha is negative: the bits that `forward_tiles` compares with."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_row = tl.minimum(row, N - 1)
    label = tl.load(labels + at_row)
    found = tl.zeros([BLOCK_M], tl.float32)
    begin = (tl.min(label, 0) // BLOCK_N * BLOCK_N).to(tl.int32)
    end = tl.max(label, 0).to(tl.int32) + 1
    for left in range(begin, end, BLOCK_N):
        if tl.reduce((label >= left) & (label < left + BLOCK_N), 0, either):
            col = left + tl.arange(0, BLOCK_N)
            at_col = tl.minimum(col, M - 1)
            dots = tile_of_dots(
                query, key, at_row, at_col, D, q_row, q_col, k_row, k_col, PRECISION, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D
            )
            found += tl.sum(tl.where(col[None, :] == label[:, None], dots, 0.0), 1)
    tl.store(level + row, tl.where(tl.load(alpha) < 0, -found, found), mask=row < N)


@triton.jit(do_not_specialize=["M", "N", "first", "span", "part_cols", "cached_rows"])
def forward_tiles(
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
    row_bar,  # [N]: products above it are counted; not RISING and alpha negative: products not above it
    col_bar,  # [M]
    row_limit,  # [N]: products above it are dropped
    col_limit,  # [M]
    cache,  # [cached_rows, M]
    row_level,  # [column blocks, N]
    row_total,
    row_higher,
    row_equal,
    row_sums,
    row_counts,
    col_level,  # [2 splits, part_cols]: of the fast and of the careful launch
    col_total,
    col_higher,
    col_equal,
    col_sums,
    col_counts,
    special,  # [column blocks, row blocks]: tiles that the fast launch leaves to the careful one
    marks,  # [programs]: sums of the fast launch were out of range
    N,
    M,
    D,
    first,  # the first column block of this launch
    span,  # rows of a split, a multiple of BLOCK_M
    part_cols,
    cached_rows,
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
    SUMS: tl.constexpr,  # of scores: "equal" class, "differ" in id, "same" id and not labelled, "all" or ""
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    DOWN: tl.constexpr,
    PAIR: tl.constexpr,
    TILE_M: tl.constexpr,  # rows of a tile of the fast launch, a multiple of BLOCK_M
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of columns against a split of the rows.

    Row statistics are stored per column block. For symmetric scores tiles are square and end at the diagonal, and a
    tile above it adds its row statistics to the mirrored columns.
    """
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    left = (first + tl.program_id(0)) * BLOCK_N
    col = left + tl.arange(0, BLOCK_N)
    at_col = col
    if CAREFUL:
        at_col = tl.minimum(col, M - 1)
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, N)
    if SYMMETRIC:
        end = tl.minimum(end, left + BLOCK_N)
    factor = tl.load(alpha)
    size = factor
    if row_alpha is not None:
        row_size = tl.load(row_alpha)
    offset = 0.0
    if bias is not None:
        offset = tl.load(bias)
    if col_bias is not None:
        of_cols = tl.load(col_bias + tl.minimum(col, M - 1))
    marked = tl.full([], 0, tl.int32)
    if CAREFUL and not SOFTPLUS:
        marked = tl.load(marks + program)
    seen = tl.full([], 0, tl.int32)
    shift = tl.full([], LOWEST, tl.float32)
    if row_alpha is not None:
        row_shift = tl.full([], LOWEST, tl.float32)
    bad = tl.zeros([DOWN, 8], tl.int1)
    level = tl.full([BLOCK_N], LOWEST, tl.float32)
    exact = tl.zeros([BLOCK_N], tl.float32)
    total = tl.zeros([DOWN, 8, BLOCK_N], tl.float32)
    higher = tl.zeros([DOWN, 8, BLOCK_N], tl.float32)
    equal = tl.zeros([DOWN, 8, BLOCK_N], tl.float32)
    sums = tl.zeros([DOWN, 8, BLOCK_N], tl.float32)
    counts = tl.zeros([DOWN, 8, BLOCK_N], tl.float32)
    for top in range(begin, end, BLOCK_M):
        row = top + tl.arange(0, BLOCK_M)
        at_row = row
        if CAREFUL:
            at_row = tl.minimum(row, N - 1)
        tile = special + tl.program_id(0).to(tl.int64) * tl.cdiv(N, TILE_M) + top // TILE_M
        if CAREFUL:
            mine = (tl.load(tile).to(tl.int32) | marked) != 0
        else:
            odd = is_special(
                labels,
                label_low,
                label_high,
                query_ids,
                block_ids,
                tl.minimum(row, N - 1),
                tl.minimum(col, M - 1),
                top,
                left,
                N,
                M,
                SELF,
                SYMMETRIC,
                BLOCK_M,
                BLOCK_N,
            )
            tl.store(tile, odd.to(tl.int8))
            mine = odd == 0
        if mine:
            dots = tile_of_dots(
                query, key, at_row, at_col, D, q_row, q_col, k_row, k_col, PRECISION, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D
            )
            part = tl.program_id(0).to(tl.int64) * N + row
            stored = row < N
            if SYMMETRIC:
                stored = stored & (row < left)
            if cache is not None:
                if top + BLOCK_M <= cached_rows:
                    tl.store(cache + row.to(tl.int64)[:, None] * M + col[None, :], dots, mask=(col < M)[None, :])
            if RISING:
                dots, size = rising(dots, factor)
            if CAREFUL:
                there = within(row, col, N, M, SELF)
                if MORE:
                    more = same_id(there, col, at_row, at_col, labels, query_ids, key_ids)
            if SUMS == "same" and not CAREFUL:  # no pair of such a tile has equal ids
                if row_sums is not None:
                    tl.store(row_counts + part, 0.0, mask=stored)
                    tl.store(row_sums + part, 0.0, mask=stored)
            elif SUMS != "":
                scores = dots
                if CAREFUL or SUMS == "equal":
                    if SUMS == "equal":
                        summed = tl.load(query_classes + at_row)[:, None] == tl.load(key_classes + at_col)[None, :]
                        if CAREFUL:
                            summed = summed & there
                    elif SUMS == "differ":
                        differ = tl.load(query_ids + at_row)[:, None] != tl.load(key_ids + at_col)[None, :]
                        summed = there & differ
                    elif SUMS == "same":
                        summed = more
                    else:
                        summed = there
                    scores = tl.where(summed, dots, 0.0)
                    if row_sums is not None:
                        tl.store(row_counts + part, tl.sum(number_of(summed), 1), mask=stored)
                    if col_sums is not None:
                        counts += folded(number_of(summed), DOWN, PAIR, BLOCK_M, BLOCK_N)
                else:  # all pairs of such a tile have different ids
                    if row_sums is not None:
                        tl.store(row_counts + part, BLOCK_N * 1.0, mask=stored)
                    if col_sums is not None:
                        counts += BLOCK_M // (8 * DOWN)
                if row_sums is not None:
                    tl.store(row_sums + part, tl.sum(scores, 1) * size, mask=stored)
                if col_sums is not None:
                    sums += folded(scores, DOWN, PAIR, BLOCK_M, BLOCK_N)
            if CAREFUL:
                excluded = query_ids
                if MORE:
                    excluded = None
                dots = negatives_of(
                    dots, float("-inf"), there, row, col, at_row, at_col, labels, excluded, key_ids, SYMMETRIC
                )
            ranked = dots
            if CAREFUL and MORE:
                ranked = tl.where(more, float("-inf"), dots)
            if row_higher is not None:
                bar = tl.load(row_bar + at_row)[:, None]
                above = tl.sum(number_of(ranked > bar), 1)
                if not RISING:
                    above = tl.where(factor < 0, BLOCK_N - above, above)
                tl.store(row_higher + part, above, mask=stored)
                if row_equal is not None:
                    tl.store(row_equal + part, tl.sum(number_of(ranked == bar), 1), mask=stored)
            if col_higher is not None:
                bar = tl.load(col_bar + at_col)[None, :]
                seen += BLOCK_M
                higher += folded(number_of(ranked > bar), DOWN, PAIR, BLOCK_M, BLOCK_N)
                if col_equal is not None:
                    equal += folded(number_of(ranked == bar), DOWN, PAIR, BLOCK_M, BLOCK_N)
            row_cut = None
            if row_limit is not None:
                row_cut = tl.load(row_limit + at_row)[:, None]
            col_cut = None
            if col_limit is not None:
                col_cut = tl.load(col_limit + at_col)[None, :]
            if SOFTPLUS:
                s = dots * size + offset
                if CAREFUL and MORE:
                    s = tl.where(more, -s, s)
                value = softplus(s)
                if row_total is not None:
                    tl.store(row_total + part, tl.sum(value, 1), mask=stored)
                if col_total is not None:
                    total += folded(value, DOWN, PAIR, BLOCK_M, BLOCK_N)
            elif CAREFUL:
                s = dots * size
                if col_bias is not None:
                    s += of_cols[None, :]
                if row_total is not None:
                    read = s
                    if row_alpha is not None:
                        read = dots * row_size
                        if col_bias is not None:
                            read += of_cols[None, :]
                    kept = dropped_above(read, dots, row_cut, float("-inf"))
                    highest = tl.maximum(tl.max(kept, 1), LOWEST)
                    tl.store(row_level + part, highest, mask=stored)
                    tl.store(row_total + part, tl.sum(tl.exp2(kept - highest[:, None]), 1), mask=stored)
                if col_total is not None:
                    kept = dropped_above(s, dots, col_cut, float("-inf"))
                    highest = tl.maximum(level, tl.max(kept, 0))
                    exact = exact * tl.exp2(level - highest) + tl.sum(tl.exp2(kept - highest[None, :]), 0)
                    level = highest
            else:
                if shift == LOWEST:
                    # Not the maximum of dots * size, which would keep the product and the shift below from being fused.
                    highest = tl.maximum(tl.max(tl.max(dots, 1), 0) * size, tl.min(tl.min(dots, 1), 0) * size)
                    if col_bias is not None:
                        highest += tl.max(of_cols, 0)
                    shift = tl.maximum(highest, LOWEST)
                    if row_alpha is not None:
                        hardest = tl.maximum(
                            tl.max(tl.max(dots, 1), 0) * row_size, tl.min(tl.min(dots, 1), 0) * row_size
                        )
                        if col_bias is not None:
                            hardest += tl.max(of_cols, 0)
                        row_shift = tl.maximum(hardest, LOWEST)
                if col_bias is not None:
                    e = tl.exp2(dots * size + (of_cols - shift)[None, :])
                else:
                    e = tl.exp2(dots * size - shift)
                if row_total is not None:
                    hard = e
                    if row_alpha is not None:
                        if col_bias is not None:
                            hard = tl.exp2(dots * row_size + (of_cols - row_shift)[None, :])
                        else:
                            hard = tl.exp2(dots * row_size - row_shift)
                    found = tl.sum(dropped_above(hard, dots, row_cut, 0.0), 1)
                    bad = bad | out_of_range(found, DOWN, PAIR, BLOCK_M)
                    if row_alpha is not None:
                        tl.store(row_level + part, row_shift, mask=stored)
                    else:
                        tl.store(row_level + part, shift, mask=stored)
                    tl.store(row_total + part, found, mask=stored)
                if col_total is not None:
                    total += folded(dropped_above(e, dots, col_cut, 0.0), DOWN, PAIR, BLOCK_M, BLOCK_N)
    if not SOFTPLUS and not CAREFUL:
        marked = any_of(bad)
        if col_total is not None:
            exact = unfolded(total)
            marked |= tl.reduce((exact < LEAST) | (exact > MOST), 0, either).to(tl.int32)
            level = tl.zeros([BLOCK_N], tl.float32) + shift
        marked = tl.where(shift > LOWEST, marked, 0)
        tl.store(marks + program, marked)
    void = marked != 0
    if CAREFUL:
        void = False
    slot = tl.program_id(1)
    if CAREFUL:
        slot += tl.num_programs(1)
    at = slot.to(tl.int64) * part_cols + (col - first * BLOCK_N)
    if col_total is not None:
        if SOFTPLUS:
            exact = unfolded(total)
        else:
            tl.store(col_level + at, tl.where(void, LOWEST, level), mask=col < M)
        tl.store(col_total + at, tl.where(void, 0.0, exact), mask=col < M)
    if col_higher is not None:
        above = unfolded(higher)
        if not RISING:
            above = tl.where(factor < 0, seen - above, above)
        tl.store(col_higher + at, tl.where(void, 0.0, above), mask=col < M)
    if col_equal is not None:
        tl.store(col_equal + at, tl.where(void, 0.0, unfolded(equal)), mask=col < M)
    if col_sums is not None:
        tl.store(col_sums + at, tl.where(void, 0.0, unfolded(sums) * size), mask=col < M)
        tl.store(col_counts + at, tl.where(void, 0.0, unfolded(counts)), mask=col < M)


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

    TRIANGLE, if it is not 0, is the width of a column block of symmetric scores: part p comes from column block `first
    + p` and exists only for rows above its diagonal tile.
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
            mask = mask & ((at // TRIANGLE)[None, :] < first + p[:, None])
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
