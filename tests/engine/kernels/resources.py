"""Writes benchmarks/results/kernels.md: what each kernel of the launch table uses of each GPU, and what the paper's do.

    python -m tests.engine.kernels.resources            (make kernels)
    python -m tests.engine.kernels.resources --targets 80 90 --out out/kernels.md

Everything is read from ahead-of-time compilation; no GPU is needed, and nothing is timed.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from contratile.engine.backends.triton_configs import TABLE
from contratile.engine.backends.triton_launch import Launch
from tests.engine.kernels import first_generation, instructions
from tests.engine.kernels.ahead_of_time import SHARED_LIMIT, TARGETS, Report, Target, name_of, report
from tests.engine.kernels.samples import name_of_launch, sample_launches

OUT = Path(__file__).parents[3] / "benchmarks" / "results" / "kernels.md"
D = 512
HEAD = 256
"""Features that the paper's kernels take at a time; D is a multiple."""

COLUMNS = (
    *("GPU", "kernel", "features", "tile", "warps, stages"),
    *("registers", "spills", "shared memory", "of", "tensor cores", "copies"),
)
COUNTED = (
    *("GPU", "kernel", "call", "generation", "tile, warps", "registers", "blocks"),
    *("all", *instructions.CLASSES, "special", "product"),
)
EMPTY = "`-`"
PAGE = """# What the kernels use

Compiled ahead of time for D = {d}, N = 4096 ({versions}) by `make kernels`.
**Nothing here was run or timed on a GPU.**

Registers are a thread's. Spills are bytes that a thread stores and loads because registers ran out. Shared memory is a
block's, beside what a block may have; on sm_100 with columns of tensor memory, of which there are 512. Tensor-core
instructions and asynchronous copies into shared memory (cp.async, TMA) are counted in the code.

## Contratile

{ours}

## Instructions per score

bf16, D = {d}: machine instructions that a thread carries out on a tile, divided by its scores, the product's own aside
(`tests/engine/kernels/instructions.py` says where the border lies). Counted in disassembled code; each block of code is
weighted by how often it runs. "first" is the generation of kernels at commit 280c4b3. Classes are of interior tiles;
"special" is all instructions of a tile that takes every branch, "product" those of the product. Instructions outside of
the loop over tiles are left out. "blocks" is how many blocks fit on a multiprocessor by registers and memory.

{instructions}

## The paper's kernels (inf-cl), measured the same way

{theirs}
"""


def ours(target: Target) -> Iterable[tuple[str, str, Launch]]:
    """Kernels with what features they are for and the tile they work on."""
    seen = set()
    kinds = [(torch.bfloat16, "ieee")]  # float16 is launched alike
    kinds += [(torch.float32, precision) for precision in TABLE[target] if precision != "16-bit"]
    for dtype, precision in kinds:
        for launch in sample_launches(target, D, dtype, precision):
            features = str(dtype).removeprefix("torch.") + (f", {precision}" if dtype == torch.float32 else "")
            tile = "x".join(
                str(launch.arguments[f"BLOCK_{axis}"]) for axis in "MND" if f"BLOCK_{axis}" in launch.arguments
            )
            if tile or launch.kernel.__name__ not in seen:  # the merge knows no features
                yield features if tile else "statistics", tile, launch
            seen.add(launch.kernel.__name__)


def theirs() -> Iterable[tuple[str, str, Launch]]:
    """The paper's three kernels as its package launches them."""
    from inf_cl import flash

    n = 4096
    q, k = (torch.empty(n, D // HEAD, HEAD, device="meta") for _ in range(2))
    vector = torch.empty(n, device="meta")
    sizes: dict[str, Any] = {"nheads": D // HEAD, "seqlen_q": n, "seqlen_k": n}
    sizes |= {"BLOCK_HEADDIM": HEAD, "BLOCK_M": 64, "BLOCK_N": 64}
    options = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}
    both = {"Q": q, "K": k, "LSE": vector}
    for kernel, more in (
        (flash._prob_fwd_kernel, {}),
        (flash._dq_prob_bwd_kernel, {"dQ": q, "dLSE": vector}),
        (flash._dk_prob_bwd_kernel, {"dK": k, "dLSE": vector}),
    ):
        yield "float32, tf32", f"64x64x{HEAD}", Launch(kernel, (n // 64,), both | more | sizes, options)


def rows(launches: Iterable[tuple[str, str, Launch]], target: Target, notify: Callable[[str], None]) -> Iterable[str]:
    for features, tile, launch in launches:
        start = row_start(target, features, tile, launch)
        notify(start)
        try:
            cells = _cells(report(launch, target))
        except Exception as error:  # what does not compile for a target is a row too
            reason = str(error).strip().splitlines()[0].rsplit(": ", 1)[-1]
            cells = [f"does not compile: {reason}", *[EMPTY] * 5]
        yield start + _row(cells)[1:]


def row_start(target: Target, features: str, tile: str, launch: Launch) -> str:
    """What is launched; what it uses follows."""
    warps, stages = (launch.options[name] for name in ("num_warps", "num_stages"))
    return _row([name_of(target), name_of_launch(launch), features, tile, f"{warps}, {stages}"])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(found: Report) -> list[str]:
    tensor_memory = f" + {found.tmem} columns" if found.tmem else ""
    return [
        str(found.registers),
        f"{found.spills} B",
        f"{found.shared / 1024:.0f}K{tensor_memory}",
        f"{SHARED_LIMIT[found.target] / 1024:.0f}K",
        ", ".join(f"{count} {name}" for name, count in found.mma.items()) or EMPTY,
        ", ".join(f"{count} {name}" for name, count in found.copies.items()) or EMPTY,
    ]


def page(targets: Sequence[Target], notify: Callable[[str], None]) -> str:
    """The file."""
    head = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    mine, paper = list(head), list(head)
    for target in targets:
        mine += rows(ours(target), target, notify)
        paper += rows(theirs(), target, notify)
    counted = [_row(COUNTED), _row(["---"] * len(COUNTED))]
    for target in targets:
        counted += counted_rows(target, notify) if isinstance(target, int) else ()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("triton", "torch", "inf-cl"))
    tables = {"ours": mine, "theirs": paper, "instructions": counted}
    return PAGE.format(d=D, versions=versions, **{name: "\n".join(lines) for name, lines in tables.items()})


def counted_rows(target: int, notify: Callable[[str], None]) -> Iterable[str]:
    """Instructions per score, those of the first generation before today's."""
    for call, kernel_launches in instructions.CALLS.items():
        for launch in kernel_launches(target, D):
            if "BLOCK_D" in launch.arguments:
                kernel = launch.kernel.fn.__name__
                start = [name_of(target), kernel, call]
                notify(_row([*start, "instructions"]))
                if old := first_generation.TABLE.get((target, FIRST.get(call, call), kernel)):
                    use = (old.tile, old.warps, old.registers, old.blocks_per_sm)
                    yield _counted_row([*start, "first"], use, old.interior, sum(old.special), old.product)
                now, special = (instructions.counted(launch, target, path) for path in instructions.PATHS)
                use = (now.tile, now.warps, now.registers, now.blocks_per_sm)
                classes = list(now.by_class.values())
                yield _counted_row([*start, "now"], use, classes, special.total, now.product)


FIRST: dict[str, str] = {}
"""Calls that the first generation is recorded for by another name."""


def _counted_row(
    start: list[str],
    use: tuple[tuple[int, int], int, int, int],
    classes: Sequence[float],
    special: float,
    product: float,
) -> str:
    (m, n), warps, registers, blocks = use
    counts = [sum(classes), *classes, special, product]
    return _row([*start, f"{m}x{n}, {warps}", str(registers), str(blocks), *(f"{count:.2f}" for count in counts)])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.kernels.resources", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--targets", nargs="+", default=[str(target) for target in TARGETS])
    options = parser.parse_args(argv)
    targets: list[Target] = [int(name) if name.isdigit() else name for name in options.targets]
    text = page(targets, notify=lambda what: print(what, file=sys.stderr))
    unfinished = options.out.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.replace(options.out)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
