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
KERNELS, HOST = "triton_kernels.py", "triton_tiles.py"
BATTERY = [f"tests/engine/kernels/interpreted/test_{name}.py" for name in ("primitive", "losses", "counts")]


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = "two_sets and ieee"
    """which to run, in the words of pytest's -k"""

    @property
    def path(self) -> Path:
        return Path("contratile/engine/backends", self.file)


MUTATIONS = [
    Mutation("rows beyond the end count", KERNELS,
             "(row < rows_end)[:, None] & (col < cols_end)[None, :]\n    if query_ids",
             "(row == row)[:, None] & (col < cols_end)[None, :]\n    if query_ids"),
    Mutation("columns beyond the end count", KERNELS,
             "(row < rows_end)[:, None] & (col < cols_end)[None, :]\n    if query_ids",
             "(row < rows_end)[:, None] & (col == col)[None, :]\n    if query_ids"),
    Mutation("features beyond D are read", KERNELS, "k = tl.load(k_at, mask=d[None, :] < D - start, other=0.0)",
             "k = tl.load(k_at)"),
    Mutation("strides of the queries swapped", KERNELS, "at_row[:, None] * q_row + wide[None, :] * q_col",
             "at_row[:, None] * q_col + wide[None, :] * q_row",
             "test_strides"),
    Mutation("the stride of features forgotten in a step", KERNELS, "k_at += step * k_col", "k_at += step",
             "test_strides or beyond"),
    Mutation("int32 offset of a row", KERNELS, "at_row = tl.minimum(row, N - 1).to(tl.int64)",
             "at_row = tl.minimum(row, N - 1)",
             "beyond"),
    Mutation("int32 offset of a feature", KERNELS, "wide = d.to(tl.int64)", "wide = d",
             "beyond"),
    Mutation("no shift of a row's exponentials", KERNELS,
             "total * tl.exp2(level - top) + tl.sum(tl.exp2(s - top[:, None]), 1)",
             "total * tl.exp2(level - level) + tl.sum(tl.exp2(s - level[:, None]), 1)",
             "extreme"),
    Mutation("running sum not brought to the new level", KERNELS,
             "total = total * tl.exp2(level - top) +", "total = total +"),
    Mutation("the last tile of a split skipped", KERNELS, "for start in range(begin, end, BLOCK_N):",
             "for start in range(begin, tl.maximum(end - BLOCK_N, begin + 1), BLOCK_N):"),
    Mutation("a part not brought to the common level", KERNELS, "sums * tl.exp2(top - highest)", "sums"),
    Mutation("diagonal tiles merged twice", KERNELS,
             "[None, :] > first + p[:, None]", "[None, :] >= first + p[:, None]",
             "one_set and ieee"),
    Mutation("no self exclusion", KERNELS, "    if SELF:\n", "    if False:\n",
             "one_set and ieee"),
    Mutation("positives of equal id excluded", KERNELS, "same = same & ~positive", "same = same & same"),
    Mutation("TF32 cut instead of rounded", KERNELS, "bits + 0x1000", "bits + 0",
             "rounded_operands or biased"),
    Mutation("NaN rounded to a number", KERNELS, "tl.where(x == x, rounded, x)", "rounded",
             "nan"),
    Mutation("softplus without its series", KERNELS, "tl.where(e < 0.0625, series,", "tl.where(e < 0.0, series,",
             "softplus"),
    Mutation("the last group of row blocks misplaced", KERNELS, "within % depth", "within % GROUP",
             "any_workspace or higher"),
    Mutation("a chunk's row offset forgotten", KERNELS, "row, col = first_row + down", "row, col = down"),
    Mutation("g written past its row", KERNELS, "place = down.to(tl.int64)[:, None] * grad_row",
             "place = down.to(tl.int64)[:, None] * (cols_end - first_col)"),
    Mutation("the positive of a row beyond the end", KERNELS, "tl.where(row < rows_end, label, -1)", "label"),
    Mutation("positives of columns forgotten", KERNELS,
             "g += tl.where(mirrored, tl.load(pos_grad + at_col)[None, :], 0.0)", "g += 0.0",
             "one_set and ieee"),
    Mutation("signs not turned at positives", KERNELS, "g = tl.where(positive, -g, g) * sigmoid(", "g = g * sigmoid(",
             "softplus and ieee"),
    Mutation("positives read by every split", KERNELS,
             "mask=(row < N) & (label >= begin) & (label < end)", "mask=row < N",
             "two_sets or one_set or ragged"),
    Mutation("gradients not near 1", HOST,
             "largest.frexp().exponent - (13 if fp16 else 1)", "largest.frexp().exponent * 0",
             "upstream or small_weights"),
    Mutation("first product added to old memory", HOST, "first=number == 0", "first=False"),
    Mutation("diagonal chunk counted twice in the scale", HOST, "share = 0.5 if", "share = 1.0 if",
             "one_set and ieee"),
    Mutation("diagonal chunk counted twice in the features", HOST, "if rows != cols:", "if True:",
             "one_set and ieee"),
    Mutation("upstream factor forgotten in the keys", HOST, "dk.mul_(factor)", "dk.mul_(1.0)"),
    Mutation("chunks merged with too few parts", HOST,
             "yield _merge(into, col_parts, count,", "yield _merge(into, col_parts, 1,"),
    Mutation("row statistics of the wrong chunk", HOST,
             "row.total[rows])", "row.total[: rows.stop - rows.start])"),
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
                "-k",
                mutation.tests,
                *BATTERY,
            ],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
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
