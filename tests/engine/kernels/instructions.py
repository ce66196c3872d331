"""Counts the machine instructions that a kernel carries out per score, by class, the product's own aside.

    python -m tests.engine.kernels.instructions --targets 80 90
    python -m tests.engine.kernels.instructions --targets 90 --calls plain --paths interior special --d 512

    found = counted(launch, 90)             # of any launch with BLOCK_M, BLOCK_N, BLOCK_D and D
    found.total, found.by_class["exp2"], found.registers, found.blocks_per_sm

Nothing is run. The code is compiled ahead of time and disassembled, and its basic blocks are weighted:

- A tile is one round of the innermost loop that holds both tensor-core instructions and exponentials, or else the
  whole program. Instructions before and after that loop are `once`, given per score of a single tile.
- The feature loop is the innermost loop with tensor-core instructions and no exponential. It runs D / BLOCK_D times
  less what is peeled off it. Other loops inside a tile count once, and are named in `notes`.
- At a branch, `interior` goes the way with the fewest exponentials, then the fewest instructions; `special` the way
  with the most. Either way passes all the tensor-core instructions that it can. Threads that are masked off by a
  predicate still take their slot, and count; so do all warps where only one is sent.

The product is (1) the feature loop, (2) tensor-core instructions, copies into shared memory and waits for them, (3)
whatever no other instruction needs once these are gone: addresses of copies, their increments and masks, zeros for
the sums; peeled and unrolled rounds of the feature loop too, and (4) barriers and branches from the first copy to the
last tensor-core instruction or feature loop. The rest is counted. What both need, such as the number of a column, is
counted. `notes` says where floating-point arithmetic outside the feature loop fell to the product: for 16-bit features
there should be none. Copies of operands that pass through registers (fp32 on sm_90) are not told from results.
"""

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from contratile.engine.backends.triton_launch import Launch
from tests.engine.kernels.ahead_of_time import compiled, name_of, report
from tests.engine.kernels.samples import fast, sample_launches
from tests.engine.kernels.sass import Code, Instruction, Loop, Stop, disassembled

TARGETS = (80, 86, 89, 90, 100, 120)
PATHS = ("interior", "special")

CALLS: dict[str, Callable[[int, int], list[Launch]]] = {
    "plain": lambda target, d: fast(sample_launches(target, d, torch.bfloat16)),
    "ids": lambda target, d: fast(sample_launches(target, d, torch.bfloat16, rule="ids")),
    "training": lambda target, d: fast(sample_launches(target, d, torch.bfloat16, rule="training")),
}
"""What is counted: the launches of a call, by target and features."""

MULTIPLIES = re.compile(r"(HMMA|IMMA|QMMA|OMMA|HGMMA|QGMMA|IGMMA|UTC\w*MMA)$")
LAST = re.compile(rf"{MULTIPLIES.pattern}|LDTM$")
COPIES = re.compile(
    r"(LDGSTS|LDGDEPBAR|DEPBAR|WARPGROUP|WARPGROUPSET|UTMALDG|UTMAPF|UTC\w+|LDTM|STTM|SYNCS|ARRIVES|FENCE|UCGABAR_\w+)$"
)
"""Copies of operands, and of the product from and to tensor memory, with what waits for them."""

CLASSES: dict[str, str] = {
    "exp2": r"MUFU\.EX2",
    "other special functions": r"MUFU",
    "shuffles": r"SHFL|C?REDUX",
    "adds": r"FADD",
    "fma, mul": r"FFMA|FMUL|HFMA2\S* (?!-?RZ,RZ)|HMUL2",
    "min, max": r"FMNMX",
    "selects": r"FSEL|SEL",
    "conversions": r"F2F|F2I|I2F|F2FP|HADD2|FRND",
    "moves": r"MOV|IMAD\.MOV|IMAD\.U32 RZ,RZ|HFMA2\S* -?RZ,RZ|C?S2U?R|R2UR|R2P|P2U?R",
    "memory": r"LD|ST|RED|ATOM|CCTL|TMA",
    "control": r"BRA|BAR|EXIT|BSSY|BSYNC|BREAK|WARPSYNC|CALL|RET|NOP|MEMBAR|ERRBAR|YIELD|NANOSLEEP|BPT|B2R|ELECT",
    "integer and compare": r"",
}
"""Classes by how the name of an instruction begins; the first that fits. `memory` is loads and stores of vectors and of
results, and what goes through shared memory between warps; arithmetic of the uniform datapath is integer too."""

SIDE_EFFECTS = re.compile(r"(ST\w*|RED|REDG|ATOM\w*|CCTL\w*|UTMA\w+|BPT)$")
FLOATS = re.compile(r"MUFU|SHFL|FADD|FFMA|FMUL|FMNMX|FSEL|F2F")
ORDER = re.compile(r"(BAR|BRA|BSSY|BSYNC|BREAK|WARPSYNC|NOP|MEMBAR|ERRBAR|YIELD|ELECT|EXIT|CALL|RET)$")

REGISTERS_PER_SM = 65_536
SHARED_PER_SM = {80: 167_936, 86: 102_400, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
THREADS_PER_SM = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
TMEM_COLUMNS = 512


class Count(NamedTuple):
    """Instructions of a thread, divided by its scores."""

    kernel: str
    target: int
    tile: tuple[int, int]
    warps: int
    path: str
    registers: int
    blocks_per_sm: int
    by_class: dict[str, float]
    """outside the product"""

    product: float
    once: dict[str, float]
    """outside the loop over tiles, per score of one tile"""

    multiplied: float | None
    """products in the counted tensor-core instructions, as a part of the tile's; None if the code does not tell"""

    notes: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.by_class.values())

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in self.by_class.items() if value)
        tile = f"{self.tile[0]}x{self.tile[1]}"
        start = (
            f"{self.kernel} {name_of(self.target)} {tile} {self.warps} warps, {self.path}: {self.total:.2f} per score"
        )
        use = f"{self.registers} registers, {self.blocks_per_sm} blocks per SM"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{start} ({shown}); product {self.product:.2f}, once {sum(self.once.values()):.2f}; {use}{notes}"


@functools.cache
def class_of(instruction: Instruction) -> str:
    text = f"{instruction.name} {','.join(instruction.operands[1:3])}".removeprefix("U")  # of the uniform datapath
    return next(group for group, forms in CLASSES.items() if re.match(forms, text))


def counted(launch: Launch, target: int, path: str = "interior") -> Count:
    """Of a kernel that multiplies."""
    kernel, _ = compiled(launch, target)
    uses = report(launch, target)
    arguments = launch.arguments
    m, n = arguments["BLOCK_M"], arguments["BLOCK_N"]
    steps = -(-arguments["D"] // arguments["BLOCK_D"])
    scores = m * n / (32 * uses.num_warps)
    walk = Walk(Code(disassembled(kernel.asm["cubin"])), steps, path)
    by_class, once = ({name: found[name] / scores for name in CLASSES} for found in (walk.counted, walk.once))
    done = [(_macs(instruction, uses.num_warps), times) for instruction, times in walk.multiplications]
    told = all(macs for macs, _ in done)
    multiplied = sum(macs * times for macs, times in done) / (m * n * arguments["D"]) if told else None
    return Count(
        *(uses.kernel, target, (m, n), uses.num_warps, path, uses.registers),
        blocks_per_sm(target, uses.num_warps, uses.registers, uses.shared, uses.tmem),
        *(by_class, walk.product / scores, once, multiplied, tuple(walk.notes)),
    )


class Walk:
    """A way through one tile, and what is carried out on it."""

    def __init__(self, code: Code, steps: int, path: str) -> None:
        self.code, self.steps, self.sign = code, steps, {"interior": 1, "special": -1}[path]
        with_exp2, with_product = (
            {i for i, block in enumerate(code.blocks) if any(map(test, block.instructions))}
            for test in (_exponential, _multiplies)
        )
        assert with_product, "no tensor-core instructions"
        tiles = [loop for loop in code.loops if loop.body & with_exp2 and loop.body & with_product]
        tiles = [loop for loop in tiles if not any(other.body < loop.body for other in tiles)]
        self.tile = min(tiles, key=lambda loop: loop.header, default=None)
        features = [loop for loop in code.loops if loop.body & with_product and not loop.body & with_exp2]
        self.features = {loop for loop in features if not any(other.body < loop.body for other in features)}
        self.stops = code.way(self.tile, self._cost)
        self.rounds = self._rounds()
        items = [(instruction, stop) for stop in self.stops for instruction in code.blocks[stop.block].instructions]
        times = [self.rounds if self._in_features(stop) else 1.0 for _, stop in items]
        own = self._products(items)
        self.product = sum(time for time, is_own in zip(times, own, strict=True) if is_own)
        self.counted: Counter[str] = Counter()
        doubtful: Counter[str] = Counter()
        for (instruction, stop), is_own in zip(items, own, strict=True):
            if not is_own:
                self.counted[class_of(instruction)] += 1
            elif FLOATS.match(instruction.name) and not self._in_features(stop):
                doubtful[instruction.name] += 1
        self.multiplications = [
            (instruction, time) for (instruction, _), time in zip(items, times, strict=True) if _multiplies(instruction)
        ]
        program = code.way(None, self._cost) if self.tile else []
        outside = [stop.block for stop in program if self.tile and stop.block not in self.tile.body]
        self.once = Counter(
            class_of(instruction) for block in outside for instruction in code.blocks[block].instructions
        )
        self.notes = self._notes() + [f"{count} {name} taken for the product" for name, count in doubtful.items()]

    def _in_features(self, stop: Stop) -> bool:
        return any(loop in self.features for loop in stop.loops)

    def _cost(self, stop: Stop) -> tuple[float, ...]:
        instructions = self.code.blocks[stop.block].instructions
        times = self.steps if self._in_features(stop) else 1
        return (
            -times * sum(map(_multiplies, instructions)),
            self.sign * times * sum(map(_exponential, instructions)),
            self.sign * times * len(instructions),
        )

    def _rounds(self) -> float:
        """Of the feature loop: what is peeled off it is not gone through again."""
        inside, outside = 0, 0
        for stop in self.stops:
            found = sum(map(_multiplies, self.code.blocks[stop.block].instructions))
            inside, outside = (inside + found, outside) if self._in_features(stop) else (inside, outside + found)
        return self.steps - outside / inside if inside else 0.0

    def _products(self, items: Sequence[tuple[Instruction, Stop]]) -> list[bool]:
        """Which instructions are the product's, as the module says."""
        copies = [self._in_features(stop) or _copies(instruction) for instruction, stop in items]
        first = copies.index(True)
        last = max(i for i, (item, stop) in enumerate(items) if self._in_features(stop) or LAST.match(item.kind))
        own = [True] * len(items)
        at_end = _live_after(self.code, self.tile) if self.tile else frozenset()
        at_start: frozenset[str] = frozenset()
        while True:
            live = set(at_end | at_start)
            for i in reversed(range(len(items))):
                instruction, stop = items[i]
                wanted = False
                if not copies[i]:
                    if ORDER.match(instruction.kind):
                        wanted = not first < i < last
                    else:
                        in_a_loop = len(stop.loops) > 0
                        wanted = bool(SIDE_EFFECTS.match(instruction.kind) or in_a_loop or instruction.writes & live)
                if copies[i] or wanted:
                    live -= frozenset() if instruction.guard else instruction.writes
                if wanted:
                    live |= instruction.reads
                    own[i] = False
            if self.tile is None or live <= at_start:
                return own
            at_start |= live

    def _notes(self) -> list[str]:
        found = [] if self.features else ["feature loop unrolled"]
        for loop in {loop for stop in self.stops for loop in stop.loops} - self.features:
            kinds = {instruction.kind for i in loop.body for instruction in self.code.blocks[i].instructions}
            if "SYNCS" not in kinds:  # those wait
                found.append(f"a loop of {len(loop.body)} blocks counted as one round")
        passed = [instruction for stop in self.stops for instruction in self.code.blocks[stop.block].instructions]
        calls = {i.operands[-1] for i in passed if i.kind == "CALL" and i.jump is None}
        return found + [f"calls {name}" for name in sorted(calls)]


def _exponential(instruction: Instruction) -> bool:
    return instruction.name.startswith("MUFU.EX2")


def _multiplies(instruction: Instruction) -> bool:
    return bool(MULTIPLIES.match(instruction.kind))


def _copies(instruction: Instruction) -> bool:
    return bool(MULTIPLIES.match(instruction.kind) or COPIES.match(instruction.kind))


def _live_after(code: Code, loop: Loop) -> frozenset[str]:
    """Registers that are read after a loop as the loop left them."""
    live: dict[int, set[str]] = {i: set() for i in range(len(code.blocks)) if i not in loop.body}
    changed = True
    while changed:
        changed = False
        for number in sorted(live, reverse=True):
            now = {name for after in code.blocks[number].next for name in live.get(after, ())}
            for instruction in reversed(code.blocks[number].instructions):
                now -= frozenset() if instruction.guard else instruction.writes
                now |= instruction.reads
            changed, live[number] = changed or now != live[number], now
    exits = {after for number in loop.body for after in code.blocks[number].next} - loop.body
    return frozenset(name for number in exits for name in live[number])


def _macs(instruction: Instruction, warps: int) -> float:
    """Multiplications that a tensor-core instruction of all warps does; 0 if its name does not tell."""
    if shape := re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.name):
        return int(shape[1]) * int(shape[2]) * int(shape[3]) * warps / 4
    if shape := re.search(r"MMA\.16(8)(\d+)", instruction.name):
        return 16 * 8 * int(shape[2]) * float(warps)
    return 0.0


def blocks_per_sm(target: int, warps: int, registers: int, shared: int, tmem: int) -> int:
    """Blocks that fit on a multiprocessor at a time, by registers, shared memory, threads and tensor memory."""
    by_registers = REGISTERS_PER_SM // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED_PER_SM[target] // (shared + 1024)
    by_tmem = TMEM_COLUMNS // tmem if tmem else by_shared
    return min(by_registers, by_shared, by_tmem, THREADS_PER_SM[target] // (32 * warps))


def counts(targets: Iterable[int], calls: Iterable[str], paths: Iterable[str], d: int) -> Iterable[tuple[str, Count]]:
    """Of all kernels that multiply in these calls."""
    paths = tuple(paths)
    for target in targets:
        for call in calls:
            for launch in CALLS[call](target, d):
                if "BLOCK_D" in launch.arguments:
                    for path in paths:
                        yield call, counted(launch, target, path)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.kernels.instructions", description=__doc__)
    parser.add_argument("--targets", nargs="+", type=int, default=[80, 90], choices=TARGETS)
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--d", type=int, default=512)
    options = parser.parse_args(argv)
    for call, found in counts(options.targets, options.calls, options.paths, options.d):
        print(f"{call}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
