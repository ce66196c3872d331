"""Machine code of a kernel: instructions, basic blocks, loops, and ways through them.

    code = Code(disassembled(cubin))
    code.loops                     # innermost first
    code.way(loop, cost)           # the cheapest way through one round of a loop, or through the program (None)

nvdisasm comes inside the triton wheel. Blocks of code that nothing leads to (padding, subroutines) are left out.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
LABEL = re.compile(r"\s*([.$\w]+):\s*$")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
JUMP = re.compile(r"`\(([.$\w]+)\)")
REGISTER = re.compile(r"(?<![\w.])(UR|R|UP|P)(\d+)(?!\w)((?:\.\w+)*)")


class Instruction(NamedTuple):
    """`@guard name operands`"""

    guard: str
    name: str
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The name without its modifiers: FADD of FADD.FTZ."""
        return self.name.split(".")[0]

    @property
    def jump(self) -> str | None:
        """The label that a branch leads to. A call of a place in the kernel itself is a long jump out of a loop."""
        found = JUMP.search(self.operands[-1]) if self.kind in ("BRA", "CALL") and self.operands else None
        return found[1] if found and (self.kind == "BRA" or found[1].startswith(".L")) else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow: some thread goes on."""
        if self.jump:
            return bool(self.guard) or len(self.operands) > 1
        return bool(self.guard) or self.kind not in ("EXIT", "RET", "BPT", "KILL", "JMP")

    @property
    @cache  # noqa: B019 - the same instructions are asked for again and again
    def writes(self) -> frozenset[str]:
        """Registers and predicates."""
        return frozenset(self._written[1])

    @property
    @cache  # noqa: B019
    def reads(self) -> frozenset[str]:
        """Registers and predicates. Rather one too many: of a pair, also the half that is not read."""
        count = self._written[0]
        found = {self.guard.lstrip("!")} if self.guard else set()
        for operand in self.operands[count:]:
            for file, number, suffix in REGISTER.findall(operand):
                found.update(_row(file, int(number), self._read_width(file, suffix)))
        return frozenset(found)

    @property
    def _written(self) -> tuple[int, list[str]]:
        """How many operands are written, and what they are."""
        if NO_RESULT.match(self.kind):
            return 0, []
        most = 2 if self.kind.endswith("SETP") or self.kind.endswith("PLOP3") else 1 if self.kind in ONE_RESULT else 4
        names: list[str] = []
        count, value = 0, False  # predicates before the register, the register, predicates that carry
        for operand in self.operands[:most]:
            found = re.fullmatch(r"(UR|R|UP|P)(\d+|Z|T)", operand)
            if not found or (value and "P" not in found[1]):
                break
            count += 1
            value = value or "P" not in found[1]
            if found[2].isdigit():
                names += _row(found[1], int(found[2]), 1 if "P" in found[1] else self._written_width())
        return count, names

    def _written_width(self) -> int:
        parts = self.name.split(".")
        if shape := re.search(r"64x(\d+)x\d+", self.name):  # of a warp group, in fp32
            return int(shape[1]) // 2
        if self.kind == "LDTM":
            return next((int(part[1:]) for part in parts if re.fullmatch(r"x\d+", part)), 1)
        if self.kind in ("HMMA", "IMMA", "QMMA"):
            return 4
        if self.kind == "CS2R":
            return 1 if "32" in parts else 2
        return self._width(parts)

    def _width(self, parts: Sequence[str]) -> int:
        if self.kind in ("LDSM", "STSM"):  # 1, 2 or 4 matrices
            return int(parts[-1]) if parts[-1].isdigit() else 1
        if re.match(r"U?(LD|ST|MOV|IADD|IMAD|MUL)|F(ADD|MUL|FMA)2", self.kind):
            for part, width in (("256", 8), ("128", 4), ("64", 2), ("WIDE", 2)):
                if part in parts:
                    return width
        return 2 if re.match(r"F(ADD|MUL|FMA)2", self.kind) else 1

    def _read_width(self, file: str, suffix: str) -> int:
        if "P" in file:
            return 1
        return max(2 if ".64" in suffix or "x2" in suffix or file == "UR" else 1, self._width(self.name.split(".")))


NO_RESULT = re.compile(
    r"(ST|RED|REDG|LDGSTS|LDGDEPBAR|DEPBAR|BAR|BRA|EXIT|BSSY|BSYNC|BREAK|WARPSYNC|CALL|RET|NOP|MEMBAR|FENCE|WARPGROUP"
    r"|BPT|ERRBAR|CCTL|YIELD|NANOSLEEP|UCGABAR_\w+|WARPGROUPSET|UTMA\w+|UTC\w*MMA|UTCBAR|UTCCP|ST[GSLM]|STSM|STTM|STAS)$"
)
ONE_RESULT = {"FCHK", "SYNCS", "ELECT", "VOTE", "VOTEU", "R2P"}


def _row(file: str, first: int, count: int) -> list[str]:
    return [f"{file}{number}" for number in range(first, first + count)]


class Block(NamedTuple):
    """Instructions that are always carried out together, and the blocks that may follow, by number."""

    instructions: tuple[Instruction, ...]
    next: tuple[int, ...]
    ends: bool
    """Whether the program may be over."""


class Loop(NamedTuple):
    """Blocks that lead back to the first of them."""

    header: int
    body: frozenset[int]


class Stop(NamedTuple):
    """A block on a way through the code, and the loops that it lies in there, outermost first."""

    block: int
    loops: tuple[Loop, ...]


Cost = Callable[[Stop], tuple[float, ...]]


class Code:
    """A kernel."""

    def __init__(self, text: str) -> None:
        self.blocks = _reachable(_blocks(text))

    @cached_property
    def dominators(self) -> list[set[int]]:
        """For each block, those that every way to it passes, itself included."""
        everything = set(range(len(self.blocks)))
        found = [{0}, *(set(everything) for _ in self.blocks[1:])]
        before: list[list[int]] = [[] for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for after in block.next:
                before[after].append(number)
        changed = True
        while changed:
            changed = False
            for number in range(1, len(self.blocks)):
                new = set.intersection(*(found[i] for i in before[number])) | {number}
                changed, found[number] = changed or new != found[number], new
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, inner ones before those around them, then in the order of the code."""
        bodies: dict[int, set[int]] = {}
        for number, block in enumerate(self.blocks):
            for header in block.next:
                if header in self.dominators[number]:
                    bodies.setdefault(header, {header}).update(self._between(header, number))
        loops = [Loop(header, frozenset(body)) for header, body in bodies.items()]
        return sorted(loops, key=lambda loop: (len(loop.body), loop.header))

    def _between(self, header: int, last: int) -> set[int]:
        """Blocks from which the last one is reached without passing the header."""
        found, todo = {header, last}, [last]
        while todo:
            here = todo.pop()
            if here != header:
                more = {i for i, block in enumerate(self.blocks) if here in block.next} - found
                found |= more
                todo += more
        return found

    def way(self, within: Loop | None, cost: Cost) -> list[Stop]:
        """The cheapest way through one round of a loop, or (None) from the first block to the end of the program.

        Loops on the way are passed once, from the header back to it; the cost of a stop may depend on them.
        """
        return self._way(within, cost, ())

    def _way(self, within: Loop | None, cost: Cost, around: tuple[Loop, ...]) -> list[Stop]:
        body = within.body if within else frozenset(range(len(self.blocks)))
        start = within.header if within else 0
        inner = [loop for loop in self.loops if loop.body < body and loop.header != start]
        outermost = [loop for loop in inner if not any(loop.body < other.body for other in inner)]
        node_of = {number: loop for loop in outermost for number in loop.body}
        best: dict[int, tuple[tuple[float, ...], list[Stop]] | None] = {}

        def from_here(number: int) -> tuple[tuple[float, ...], list[Stop]] | None:
            if number not in best:
                best[number] = None  # a way that comes back here is none
                loop = node_of.get(number)
                stops = self._way(loop, cost, (*around, loop)) if loop else [Stop(number, around)]
                here = tuple(map(sum, zip(*map(cost, stops), strict=True)))
                members = loop.body if loop else {number}
                ends = any((start in self.blocks[i].next) if within else self.blocks[i].ends for i in members)
                ways: list[tuple[tuple[float, ...], list[Stop]]] = [(here, stops)] if ends else []
                after = {i for member in members for i in self.blocks[member].next} - set(members) - {start}
                for i in sorted(after & body):
                    node = node_of.get(i)
                    if rest := from_here(node.header if node else i):
                        ways.append((tuple(a + b for a, b in zip(here, rest[0], strict=True)), stops + rest[1]))
                best[number] = min(ways, key=lambda way: way[0], default=None)
            return best[number]

        found = from_here(start)
        assert found, "no way through"
        return found[1]


@cache
def disassembled(cubin: bytes) -> str:
    """What nvdisasm says of it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout, f"nvdisasm: {done.stderr.strip()}"
    return done.stdout


def _blocks(text: str) -> list[Block]:
    """All blocks in the order of the code."""
    runs: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            if runs[-1]:
                runs.append([])
            labels[label[1]] = len(runs) - 1
        elif found := INSTRUCTION.match(line):
            guard, name, rest = found[1] or "", found[2], found[3]
            operands = tuple(part.replace(".reuse", "").strip() for part in rest.split(",") if part.strip())
            instruction = Instruction("" if guard in ("PT", "UPT") else guard, name, operands)
            assert instruction.kind not in ("BRX", "JMX", "BRXU", "JMP"), f"a jump to anywhere: {line}"
            runs[-1].append(instruction)
            if instruction.jump or not instruction.falls_through:
                runs.append([])
    blocks = []
    for number, run in enumerate(runs):
        last = run[-1] if run else None
        after = [labels[last.jump]] if last and last.jump else []
        if number + 1 < len(runs) and (last is None or last.falls_through):
            # Threads of a warp that went different ways are gathered out of line: not what one counts.
            after = [number + 1] if last and ".DIV" in last.name else [*after, number + 1]
        blocks.append(
            Block(tuple(run), tuple(dict.fromkeys(after)), bool(last and last.kind == "EXIT" and not last.guard))
        )
    return blocks


def _reachable(blocks: Sequence[Block]) -> list[Block]:
    seen, todo = {0}, [0]
    while todo:
        for after in blocks[todo.pop()].next:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    number = {old: new for new, old in enumerate(sorted(seen))}
    return [blocks[old]._replace(next=tuple(number[i] for i in blocks[old].next)) for old in sorted(seen)]
