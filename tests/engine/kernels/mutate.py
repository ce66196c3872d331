"""Breaks the kernels and their host code in known ways, one at a time, and shows which test notices.

    python -m tests.engine.kernels.mutate              # the table; fails if a mutation survives
    python -m tests.engine.kernels.mutate int32        # only those whose name contains a word

A mutation is made in a copy of the package, on which the tests of `interpreted/` are run that are about its place.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
TILE, FORWARD, GRADIENT = "triton_tile.py", "triton_forward.py", "triton_gradient.py"
LAUNCH, HOST, POSITIVES = "triton_launch.py", "triton_tiles.py", "triton_positives.py"
FILES = ("primitive", "losses", "counts", "statistics", "paths")
BATTERY = [f"tests/engine/kernels/interpreted/test_{name}.py" for name in FILES]


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = "test_two_sets and ieee"
    """which to run, in the words of pytest's -k"""

    @property
    def path(self) -> Path:
        return Path("contratile/engine/backends", self.file)


MUTATIONS = [
    # --- both passes: products and pairs
    Mutation("rows beyond the end count", TILE, "there = (row < rows_end)[:, None]", "there = (row == row)[:, None]"),
    Mutation("columns beyond the end count", TILE, "& (col < cols_end)[None, :]\n    if SELF",
             "& (col == col)[None, :]\n    if SELF"),
    Mutation("features beyond D are read", TILE, "k = tl.load(k_at, mask=d[None, :] < D - start, other=0.0)",
             "k = tl.load(k_at)"),
    Mutation("strides of the queries swapped", TILE, "[:, None] * q_row + wide[None, :] * q_col",
             "[:, None] * q_col + wide[None, :] * q_row",
             "test_strides"),
    Mutation("the stride of features forgotten in a step", TILE, "k_at += step * k_col", "k_at += step",
             "test_strides or beyond"),
    Mutation("int32 offset of a row", TILE, "at_row.to(tl.int64)[:, None] * q_row", "at_row[:, None] * q_row",
             "beyond"),
    Mutation("int32 offset of a feature", TILE, "wide = d.to(tl.int64)", "wide = d",
             "beyond"),
    Mutation("TF32 cut instead of rounded", TILE, "bits + 0x1000", "bits + 0",
             "rounded_operands or biased"),
    Mutation("NaN rounded to a number", TILE, "tl.where(x == x, rounded, x)", "rounded",
             "nan"),
    Mutation("no self exclusion", TILE, "there = there & (row[:, None] != col[None, :])", "there = there & there",
             "one_set and ieee"),
    Mutation("ids of the columns compared with themselves", TILE,
             "tl.load(query_ids + at_row)[:, None] != tl.load(key_ids",
             "tl.load(key_ids + at_row)[:, None] != tl.load(key_ids"),
    Mutation("softplus without its series", TILE, "tl.where(e < 0.0625, series,", "tl.where(e < 0.0, series,",
             "softplus"),
    # --- which tiles are special
    Mutation("fast on an edge of rows", TILE, "special = (top + BLOCK_M > N).to(tl.int32)",
             "special = (top > N).to(tl.int32)",
             "edges or two_sets"),
    Mutation("fast on an edge of columns", TILE, "| (left + BLOCK_N > M).to(tl.int32)", "| (left > M).to(tl.int32)",
             "edges or two_sets"),
    Mutation("fast on a tile with positives", TILE, "found = tl.reduce((label >= start) & (label < start + width)",
             "found = tl.reduce((label > start + width) & (label < start + width)",
             "ordinary or two_sets"),
    Mutation("labels of the last row not looked at", TILE, "tl.load(label_high + block) >= start)",
             "tl.load(label_high + block) > start)",
             "ordinary or two_sets or ragged or last_label"),
    Mutation("fast on a mirrored tile with positives", TILE,
             "special |= holds_positive(labels, label_low, label_high, left // BLOCK_N, at_col, top, BLOCK_M)",
             "special |= 0",
             "one_side"),
    Mutation("fast on the diagonal of one set", TILE, "((top < left + BLOCK_N) & (left < top + BLOCK_M)).to(tl.int32)",
             "((top < left) & (left < top + BLOCK_M)).to(tl.int32)",
             "one_set"),
    Mutation("hashes searched one place off", TILE, "tl.load(right + at + (LENGTH >> halving) - 1) < wanted",
             "tl.load(right + at + (LENGTH >> halving) - 1) <= wanted",
             "excluded_pair"),
    Mutation("the last step of the search forgotten", TILE, "if LENGTH >> halving > 0:", "if LENGTH >> halving > 1:",
             "excluded_pair"),
    Mutation("ids hashed by their low half", TILE, "(ids ^ (ids >> 32)).to(tl.int32)", "ids.to(tl.int32)",
             "excluded_pair"),
    Mutation("hashes of a block not sorted", LAUNCH, ".sort(1).values.contiguous()", ".contiguous()",
             "excluded_pair or two_sets"),
    Mutation("hashes of the wrong column block", TILE, "block_ids + left // BLOCK_N * BLOCK_N", "block_ids + 0 * left",
             "excluded_pair"),
    # --- forward: the fast launch
    Mutation("range of rows not checked", FORWARD, "bad = bad | out_of_range(found, DOWN, PAIR, BLOCK_M)",
             "bad = bad | bad",
             "out_of_range"),
    Mutation("range of columns not checked", FORWARD,
             "marked |= tl.reduce((exact < LEAST) | (exact > MOST), 0, either).to(tl.int32)", "marked |= 0",
             "out_of_range"),
    Mutation("sums as low as 2^-200 are trusted", FORWARD, "LEAST = tl.constexpr(2.0**-80)",
             "LEAST = tl.constexpr(2.0**-200)",
             "out_of_range"),
    Mutation("sums of infinity are trusted", FORWARD, "MOST = tl.constexpr(2.0**100)",
             "MOST = tl.constexpr(float('inf'))",
             "out_of_range"),
    Mutation("everything is out of range", FORWARD, "LEAST = tl.constexpr(2.0**-80)", "LEAST = tl.constexpr(2.0**80)",
             "ordinary"),
    Mutation("the lowest score as shift", FORWARD, "shift = tl.maximum(highest, LOWEST)",
             "shift = tl.maximum(tl.minimum(tl.max(tl.max(dots, 1), 0) * size, tl.min(tl.min(dots, 1), 0) * size) - 90, LOWEST)",
             "ordinary"),
    Mutation("a new shift in each tile", FORWARD, "if shift == LOWEST:", "if shift < 1e30:"),
    Mutation("a row's level is not its shift", FORWARD, "tl.store(row_level + part, shift, mask=stored)",
             "tl.store(row_level + part, shift - shift, mask=stored)"),
    Mutation("marked programs of the fast launch count", FORWARD, "void = marked != 0", "void = marked > 1",
             "out_of_range or several_splits"),
    Mutation("higher columns of marked programs count twice", FORWARD,
             "tl.store(col_higher + at, tl.where(void, 0.0, above)", "tl.store(col_higher + at, above",
             "out_of_range and statistics"),
    Mutation("sums of marked programs count twice", FORWARD,
             "tl.store(col_sums + at, tl.where(void, 0.0, unfolded(sums) * size)",
             "tl.store(col_sums + at, unfolded(sums) * size",
             "out_of_range and statistics"),
    Mutation("counts of marked programs count twice", FORWARD,
             "tl.store(col_counts + at, tl.where(void, 0.0, unfolded(counts))",
             "tl.store(col_counts + at, unfolded(counts)",
             "out_of_range and statistics"),
    Mutation("marks of one program for all", FORWARD, "tl.store(marks + program, marked)",
             "tl.store(marks + program, marked * (tl.program_id(0) == 0))",
             "out_of_range or marked"),
    Mutation("a fold of too few rows", FORWARD, "tl.sum(tl.sum(apart, 2), 0)", "tl.sum(tl.sum(apart, 2), 0) * 0.5"),
    Mutation("bars of a negative scale not adjusted", LAUNCH, "torch.nextafter(-x, lowest)", "x",
             "scales_that_turn or ties"),
    Mutation("bars of a negative scale miss ties", LAUNCH, "torch.nextafter(-x, lowest)", "-x",
             "exact_ties"),
    Mutation("columns of a negative scale not complemented", FORWARD,
             "above = tl.where(factor < 0, seen - above, above)",
             "above = tl.where(factor < 0, above, above)",
             "scales_that_turn or exact_ties"),
    Mutation("fast rows read no hardness", FORWARD, "hard = tl.exp2(dots * row_size - row_shift)", "hard = e",
             "test_every_loss and ieee and hardness"),
    Mutation("the level of rows is that of columns", FORWARD, "tl.store(row_level + part, row_shift, mask=stored)",
             "tl.store(row_level + part, shift, mask=stored)",
             "test_every_loss and ieee and hardness"),
    # --- forward: the careful launch
    Mutation("careful rows read no hardness", FORWARD, "read = dots * row_size", "read = dots * size",
             "test_every_loss and ieee and hardness"),
    Mutation("gradients without hardness", GRADIENT, "read = dots * tl.load(row_alpha)", "read = dots * size",
             "test_every_loss and ieee and hardness"),
    Mutation("sides with hardness share an exponential", LAUNCH, "and not self.spec.hardness:", "and True:",
             "test_every_loss and ieee and hardness"),
    Mutation("careful launch ignores marks", FORWARD, "marked = tl.load(marks + program)\n",
             "marked = tl.load(marks + program) * 0\n",
             "out_of_range"),
    Mutation("forward forgets that careful tiles are lower", FORWARD, "tl.cdiv(N, TILE_M) + top // TILE_M",
             "tl.cdiv(N, TILE_M) + top // BLOCK_M",
             "other_shapes or other_tiles"),
    Mutation("careful columns in the place of the fast", FORWARD, "slot += tl.num_programs(1)", "slot += 0"),
    Mutation("no shift of a row's exponentials", FORWARD, "tl.sum(tl.exp2(kept - highest[:, None]), 1)",
             "tl.sum(tl.exp2(kept), 1)",
             "extreme or two_sets"),
    Mutation("running sum not brought to the new level", FORWARD, "exact = exact * tl.exp2(level - highest) +",
             "exact = exact +"),
    Mutation("padded columns are counted", FORWARD, "summed = summed & there", "summed = summed & summed",
             "statistics and two_sets or test_two_sets"),
    Mutation("equal ids are summed", FORWARD, "summed = there & differ", "summed = there & (differ | ~differ)",
             "test_two_sets or exact_ties"),
    Mutation("labelled pairs among the further positives", TILE,
             "same = same & (tl.load(labels + at_row)[:, None] != col[None, :])", "same = same & same",
             "positives"),
    Mutation("further positives are ranked", FORWARD, 'ranked = tl.where(more, float("-inf"), dots)', "ranked = dots",
             "test_two_sets and positives"),
    Mutation("further positives keep their sign", FORWARD, "s = tl.where(more, -s, s)", "s = s",
             "siglip and positives"),
    Mutation("gradients of further positives keep their sign", GRADIENT, "g = tl.where(more, -g, g)", "g = g",
             "siglip and positives"),
    Mutation("further positives are not in the gradient", GRADIENT, "summed = more", "summed = more & ~more",
             "positives"),
    Mutation("limits compared with the wrong sign", FORWARD, "kept = tl.where(dots <= limit, x, nothing)",
             "kept = tl.where(dots >= limit, x, nothing)",
             "test_two_sets and margin"),
    Mutation("products not turned for a negative scale", TILE, "dots * tl.where(factor < 0, -1.0, 1.0)", "dots * 1.0",
             "scales_that_turn"),
    Mutation("kept scores end one tile early in the forward pass", FORWARD, "if top + BLOCK_M <= cached_rows:",
             "if top + 2 * BLOCK_M <= cached_rows:",
             "kept"),
    Mutation("kept scores are the negated ones", FORWARD, "[None, :], dots, mask=(col < M)[None, :])",
             "[None, :], dots * tl.where(factor < 0, -1.0, 1.0), mask=(col < M)[None, :])",
             "scales_that_turn or kept"),
    Mutation("a part not brought to the common level", FORWARD, "sums * tl.exp2(top - highest)", "sums"),
    Mutation("diagonal tiles merged twice", FORWARD, "[None, :] < first + p[:, None]",
             "[None, :] <= first + p[:, None]",
             "one_set and ieee"),
    Mutation("the last tile of a split skipped", FORWARD, "for top in range(begin, end, BLOCK_M):",
             "for top in range(begin, tl.maximum(end - BLOCK_M, begin + 1), BLOCK_M):"),
    Mutation("chunks merged with too few parts", HOST, "for x in col)), col_parts, 2 * splits)",
             "for x in col)), col_parts, splits)"),
    Mutation("rows merged of the first chunk only", HOST, "_merges(row, row_parts, count, first=first,",
             "_merges(row, row_parts, min(count, 1), first=first,"),
    # --- positives
    Mutation("products of another row's positive", FORWARD, "col[None, :] == label[:, None], dots, 0.0)",
             "col[None, :] == label[:, None] - 1, dots, 0.0)"),
    Mutation("positives of the first tile only", FORWARD,
             "for left in range(begin, end, BLOCK_N):\n        if tl.reduce",
             "for left in range(begin, begin + BLOCK_N, BLOCK_N):\n        if tl.reduce"),
    Mutation("positives not added to rows", POSITIVES, "_add(row, pos, counted, None)",
             "_add(row, pos, counted & False, None)"),
    Mutation("positives not added to columns", POSITIVES, "_add(other, pos, back, labels)",
             "_add(other, pos, back & False, labels)"),
    Mutation("mutual positives added twice", POSITIVES, "counted & (labels[labels] != at) if symmetric",
             "counted if symmetric",
             "one_set and ieee"),
    Mutation("a row's own positive is added", POSITIVES, "counted = labels != at", "counted = labels == labels",
             "one_set and ieee"),
    Mutation("positives of columns not compared", POSITIVES, "(back & (level > of_key))",
             "(back & (level > of_key) & False)",
             "one_side"),
    Mutation("stale positives", HOST, "score_positives_(scores, pos.copy_(level))",
             "score_positives_(scores, pos.copy_(level.roll(16)))"),
    # --- backward
    Mutation("far blocks not noticed", GRADIENT, "near = tl.max(tl.abs(above), 0) <= SPAN",
             "near = tl.max(above, 0) <= 1e38",
             "far_blocks"),
    Mutation("blocks far above not noticed", GRADIENT, "near = tl.max(tl.abs(above), 0) <= SPAN",
             "near = tl.max(above, 0) <= SPAN",
             "far_blocks or limit"),
    Mutation("all blocks are far", GRADIENT, "SPAN = tl.constexpr(60.0)", "SPAN = tl.constexpr(0.0)",
             "ordinary"),
    Mutation("far columns ignored", GRADIENT, "tl.load(row_far + top // BLOCK_M) | tl.load(col_far + left // BLOCK_N)",
             "tl.load(row_far + top // BLOCK_M)",
             "far_blocks"),
    Mutation("another shift in the tiles", GRADIENT, "tl.exp2(dots * size - tl.load(shift))",
             "tl.exp2(dots * size - tl.load(shift) - 1)",
             "ordinary"),
    Mutation("the lowest log-sum-exp as shift", LAUNCH, '"shift": row.median()', '"shift": row.min() - 80',
             "ordinary"),
    Mutation("weights without exp2", GRADIENT, "other=0.0) * tl.exp2(above)", "other=0.0) * (1 + above)",
             "ordinary"),
    Mutation("weights of rows only", GRADIENT, "g = e * (of_rows[:, None] + of_cols[None, :])",
             "g = e * (of_rows[:, None] + 0 * of_cols[None, :])",
             "ordinary"),
    Mutation("gradient forgets that careful tiles are lower", GRADIENT, "high = down // TILE_M",
             "high = down // BLOCK_M",
             "other_shapes or other_tiles"),
    Mutation("sums of the careful launch over those of the fast", GRADIENT,
             "program = first_sum + tl.program_id(1)", "program = tl.program_id(1)",
             "gradient_of_the_scale"),
    Mutation("the careful launch takes all tiles", GRADIENT, "if tl.load(special + tile) == 0:",
             "if tl.load(special + tile) < 0:",
             "ordinary or two_sets"),
    Mutation("scores read beyond those that were kept", GRADIENT, "elif top + BLOCK_M <= cached_rows:",
             "elif top <= cached_rows:",
             "kept"),
    Mutation("kept scores of another width", GRADIENT, "tl.load(cache + at_row.to(tl.int64)[:, None] * M",
             "tl.load(cache + at_row.to(tl.int64)[:, None] * cols_end",
             "kept"),
    Mutation("limits of the gradient compared with the wrong sign", GRADIENT, "tl.where(dots <= tl.load(row_limit",
             "tl.where(dots >= tl.load(row_limit",
             "test_two_sets and margin"),
    Mutation("limits of columns forgotten in the gradient", GRADIENT, "if col_limit is not None:", "if False:",
             "test_two_sets and margin"),
    Mutation("excluded rows have a weight", GRADIENT, "g = tl.where(dots == LOWEST, 0.0, g)",
             "g = tl.where(dots == LOWEST, g, g)",
             "without_any_pair"),
    Mutation("the sum for a negative scale not turned", GRADIENT, "weighed = tl.where(factor < 0, -weighed, weighed)",
             "weighed = tl.where(factor < 0, weighed, weighed)",
             "extreme or scales_that_turn"),
    Mutation("positives of columns forgotten", GRADIENT,
             "g = tl.where(row[:, None] == label[None, :], tl.load(pos_weight + at_col)[None, :], g)", "g += 0.0",
             "one_set and ieee"),
    Mutation("the second group of row blocks misplaced", GRADIENT, "(high // depth * tl.num_programs(1) +",
             "(high // depth +",
             "group"),
    Mutation("a chunk's row offset forgotten", GRADIENT, "top = tl.multiple_of(first_row, BLOCK_M) + down",
             "top = 0 * first_row + down"),
    Mutation("g written past its row", GRADIENT, "[:, None] * grad_row +", "[:, None] * (cols_end - first_col) +"),
    Mutation("gradients of sums at every pair", GRADIENT,
             "g += tl.where(summed, tl.load(row_sums_grad + at_row)[:, None], 0.0)",
             "g += tl.load(row_sums_grad + at_row)[:, None]",
             "test_two_sets"),
    Mutation("gradients not near 1", HOST, "largest.frexp().exponent - (13 if fp16 else 1)",
             "largest.frexp().exponent * 0",
             "upstream or small_weights"),
    Mutation("first product added to old memory", HOST, "first=number_ == 0", "first=False"),
    Mutation("diagonal chunk counted twice in the scale", HOST, "(0.5 if self.symmetric and rows == cols else 1.0)",
             "1.0",
             "one_set and ieee"),
    Mutation("diagonal chunk counted twice in the features", HOST, "if rows != cols:", "if True:",
             "one_set and ieee"),
    Mutation("upstream factor forgotten in the keys", HOST, "dk.mul_(factor)", "dk.mul_(1.0)"),
    Mutation("sums of the last chunk kept", HOST, "self.parts.zero_()", "self.parts.mul_(1.0)",
             "two_sets or any_workspace"),
    Mutation("mutual positives counted twice in the scale", HOST,
             "torch.arange(self.n, device=labels.device), 0.5, 1.0)",
             "torch.arange(self.n, device=labels.device), 1.0, 1.0)",
             "one_set and ieee"),
    Mutation("margins of the mirrored side forgotten", LAUNCH, 'spec) if spec.cols else None\n        if symmetric:',
             'spec) if spec.cols else None\n        if False:',
             "test_one_set and margin"),
]  # fmt: skip


class Verdict(NamedTuple):
    caught_by: str | None
    seconds: float


def copy_with(mutation: Mutation, folder: Path) -> None:
    """The package in a folder, with the mutation, whose place has to be unique."""
    shutil.copytree(ROOT / "src/contratile", folder / "contratile", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / mutation.path
    text = path.read_text()
    places = text.count(mutation.old)
    assert places == 1, f"{mutation.name}: expected one place in {mutation.file}, got {places}"
    path.write_text(text.replace(mutation.old, mutation.new))


def judge(mutation: Mutation) -> Verdict:
    """Run the battery on the mutant, up to the first test that fails."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy_with(mutation, Path(folder))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--no-header",
                "--tb=no",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow",
                "-k",
                mutation.tests,
                *BATTERY,
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "TRITON_INTERPRET": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": folder,
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    seconds = time.monotonic() - start
    if done.returncode == 0:
        return Verdict(None, seconds)
    found = re.search(r"^(?:FAILED|ERROR) \S*?::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and found, done.stdout + done.stderr  # a battery that does not start catches nothing
    return Verdict(found[1], seconds)


def main() -> int:
    wanted = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in sys.argv[1:])]
    survivors = 0
    print(f"| {'mutation':48} | caught by | seconds |\n| {'-' * 48} | --- | --- |")
    for mutation in wanted:
        verdict = judge(mutation)
        survivors += verdict.caught_by is None
        print(f"| {mutation.name:48} | {verdict.caught_by or 'NOTHING'} | {verdict.seconds:.0f} |", flush=True)
    print(f"{len(wanted) - survivors} of {len(wanted)} caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
