"""Runs the PTX that triton makes for sm_80 (mma.sync, cp.async, ldmatrix) on numpy, for small problems.

    with emulated():  # kernels are compiled for sm_80 and run here, on CPU tensors
        host_function(...)

It sees what triton's interpreter cannot: layouts of fragments, software pipelining, barriers, what TF32 cuts off. An
instruction becomes a function of a `Block` once, and is then carried out for all threads of the block at a time.
Branches may diverge; what threads do together (barriers, shuffles, tensor cores) may not lie within.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from contratile.engine.backends.triton_launch import Launch
from tests.engine.kernels.ahead_of_time import compiled, recorded
from tests.engine.kernels.floats import Array, from_bf16, to_bf16
from tests.engine.kernels.ptx_machine import Block, GlobalMemory
from tests.engine.kernels.samples import name_of_launch

Act = Callable[[Block], None]
Read = Callable[[Block], Array]

DTYPES: dict[str, Any] = {
    **{f"{sign}{bits}": getattr(np, f"uint{bits}") for sign in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64, "pred": np.bool_},
}
KEPT_AS = {"%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64}


class Step(NamedTuple):
    """An instruction."""

    text: str
    name: str
    """ex2.approx.ftz.f32, say"""

    predicate: tuple[str, bool] | None
    """A register, and whether it is negated."""

    act: Act
    target: int | None
    """Of a branch: the number of the next step."""

    together: bool
    """Whether all threads have to be there."""


class Program:
    """A kernel, ready to be run."""

    def __init__(self, ptx: str) -> None:
        start = ptx.index(".entry")
        head, body = ptx[start:].split("$L__func_end0")[0].split("{", 1)  # debug information follows
        self.params = re.findall(r"\.param\s+\.(\w+)\s[^,)]*?(\w+)\s*[,\n)]", head)
        self.threads = int(re.findall(r"\.(?:reqntid|maxntid)\s+(\d+)", head)[0])
        self.register_sizes = re.findall(r"\.reg\s+\.\w+\s+(%\w+?)<(\d+)>", body)
        body = re.sub(r"//[^\n]*", "", body)
        body = re.sub(r"\.(reg|loc|file|pragma)\b[^;\n]*;?", "", body)
        texts: list[str] = []
        labels: dict[str, int] = {}
        for chunk in body.split(";"):
            while label := re.match(r"\s*(\$\w+):", chunk):
                labels[label[1]] = len(texts)
                chunk = chunk[label.end() :]
            text = " ".join(chunk.split()).strip("{} ") if "," not in chunk else " ".join(chunk.split())
            if text:
                texts.append(text)
        labels["return"] = len(texts)
        self.steps = [self._step(text, labels) for text in texts]

    def _step(self, text: str, labels: dict[str, int]) -> Step:
        found = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", text)
        assert found, text
        negated, register, opcode, rest = found.groups()
        parts, operands = opcode.split("."), _split(rest)
        target = None
        act: Act = _nothing
        if parts[0] in ("bra", "ret", "exit"):
            target = labels[operands[0] if parts[0] == "bra" else "return"]
        else:
            act = _act(parts, operands, self.params, text)
        together = parts[0] in ("bar", "barrier", "mma", "ldmatrix", "shfl", "redux") or opcode.startswith("cp.async")
        return Step(text, opcode, (register, negated == "!") if register else None, act, target, together)

    def run(self, block: Block, tally: Counter[str] | None = None) -> None:
        """From the first step to the last. Threads that went different ways: those furthest behind come first.

        `tally` counts the steps that were taken, by name; those that a predicate masks off take their slot too.
        """
        for kind, count in self.register_sizes:
            zeros: Array = np.zeros(block.threads, KEPT_AS[kind])
            block.registers.update({f"{kind}{i}": zeros for i in range(int(count))})
        now, places = 0, None
        while now < len(self.steps):
            step = self.steps[now]
            if tally is not None:
                tally[step.name] += 1
            here = mask = None if places is None else places == now
            if step.predicate is not None:
                holds = block.registers[step.predicate[0]] ^ step.predicate[1]
                mask = holds if here is None else here & holds
            if step.target is None:
                assert here is None or not step.together, f"threads are not together at {step.text}"
                block.mask = mask
                step.act(block)
                if here is None or places is None:
                    now += 1
                    continue
                places[here] = now + 1
            else:
                if here is None and (mask is None or mask.all() or not mask.any()):
                    now = step.target if mask is None or mask.all() else now + 1
                    continue
                places = np.full(block.threads, now) if places is None else places
                places[places == now] = now + 1
                places[mask] = step.target
            now = int(places.min())
            if (places == now).all():
                places = None


def run(
    program: Program, shared: int, grid: tuple[int, ...], arguments: list[Any], tally: Counter[str] | None = None
) -> None:
    """A launch: `arguments` in the order of the kernel's parameters, those that are constants left out."""
    memory = GlobalMemory([argument for argument in arguments if isinstance(argument, Tensor)])
    values: dict[str, Any] = {}
    for (kind, name), argument in zip(program.params, [*arguments, *[0] * len(program.params)], strict=False):
        number = memory.address(argument) if isinstance(argument, Tensor) else argument
        if kind == "f32":
            values[name] = np.full(program.threads, number, np.float32).view(np.uint32)
        else:
            bits = int(kind[1:])
            values[name] = np.full(program.threads, int(number) & ((1 << bits) - 1), DTYPES[f"u{bits}"])
    wide, high, deep = (*grid, 1, 1)[:3]
    size = {"%nctaid.x": wide, "%nctaid.y": high, "%nctaid.z": deep, "%ntid.x": program.threads}
    with np.errstate(all="ignore"):  # masked lanes may compute anything
        for z, y, x in np.ndindex(deep, high, wide):
            block = Block(program.threads, shared, memory, {**size, "%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": z})
            block.registers.update(values)
            program.run(block, tally)
    memory.write_back()


@contextmanager
def emulated(tallies: dict[str, Counter[str]] | None = None) -> Iterator[list[Launch]]:
    """Inside, kernels are compiled for sm_80 and emulated. `tallies` counts the steps by `name_of_launch`."""

    def emulate(launch: Launch) -> None:
        kernel, _ = compiled(launch, 80)
        program = _programs.setdefault(kernel.hash, None) or Program(kernel.asm["ptx"])
        _programs[kernel.hash] = program
        kept = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        tally = None if tallies is None else tallies.setdefault(name_of_launch(launch), Counter())
        run(program, kernel.metadata.shared, launch.grid, [launch.arguments[name] for name in kept], tally)

    with recorded(emulate) as launches:
        yield launches


_programs: dict[str, Program | None] = {}


# --- operands -----------------------------------------------------------------------------------------------------


def _split(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _read(operand: str, kind: str) -> Read:
    """The value of an operand as a `kind`."""
    operand = operand.strip("{} ")
    dtype = DTYPES[kind]
    if operand.startswith("%"):
        if np.dtype(dtype).itemsize == 1 and kind != "pred":  # the low bits of a wider register
            return lambda block: block.registers[operand].astype(np.uint8).view(dtype)
        return lambda block: block.registers[operand].view(dtype)
    if operand == "global_smem":  # all of shared memory, from its beginning
        return lambda block: np.zeros(block.threads, dtype)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        number = np.uint32(int(operand[2:], 16)).view(dtype)
    elif kind == "pred":
        number = np.bool_(int(operand, 0) != 0)
    else:
        bits = np.dtype(dtype).itemsize * 8
        number = DTYPES[f"u{bits}"](int(operand.rstrip("U"), 0) & ((1 << bits) - 1)).view(dtype)
    return lambda block: np.full(block.threads, number, dtype)


def _address(operand: str, bits: int) -> Read:
    """[register + number]"""
    found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    assert found, operand
    base, offset = _read(found[1], f"u{bits}"), int(found[2] or "0", 0) & ((1 << bits) - 1)
    return lambda block: base(block) + DTYPES[f"u{bits}"](offset)


@cache
def _kept_as(name: str) -> Any:
    kind = re.match(r"%[a-z]+", name)
    assert kind, name
    return KEPT_AS[kind[0]]


def _write(name: str, value: Array, block: Block) -> None:
    """To the lanes that the instruction is for."""
    if value.shape != (block.threads,):
        value = np.broadcast_to(value, block.threads)
    bits = np.ascontiguousarray(value).view(_kept_as(name))
    block.registers[name] = bits if block.mask is None else np.where(block.mask, bits, block.registers[name])


# --- instructions -------------------------------------------------------------------------------------------------


def _nothing(block: Block) -> None:
    """Neither does a branch, which the program carries out, nor what orders memory, which is in order here."""


def _act(parts: list[str], operands: list[str], params: list[tuple[str, str]], text: str) -> Act:
    """What an instruction does."""
    name = parts[0]
    if name in MEMORY:
        return MEMORY[name](parts, operands, params)
    if name in TOGETHER:
        return TOGETHER[name](parts, operands)
    if name not in VALUES:
        raise NotImplementedError(f"{text}: add it to VALUES, MEMORY or TOGETHER of {__name__}")
    value = VALUES[name](parts, operands)
    targets = _names(operands[0])
    if len(targets) == 1:
        return lambda block: _write(targets[0], value(block), block)

    kept = [target for target in targets if target != "_"]  # the others are thrown away

    def unpack(block: Block) -> None:
        parts_of = np.ascontiguousarray(value(block)).view(_kept_as(kept[0])).reshape(-1, len(targets))
        for target in kept:
            _write(target, parts_of[:, targets.index(target)], block)

    return unpack


def _load(parts: list[str], operands: list[str], params: list[tuple[str, str]]) -> Act:
    names, kind = _names(operands[0]), parts[-1]
    if parts[1] == "param":
        source = operands[1].strip("[] ")
        wide = names[0].startswith("%rd") and kind.endswith("32")

        def get(block: Block) -> None:
            value = block.registers[source]
            _write(names[0], value.view(DTYPES[kind]).astype(DTYPES[kind[0] + "64"]) if wide else value, block)

        return get
    space = parts[1].split("::")[0].split(":")[0]
    address = _address(operands[1], 64 if space == "global" else 32)

    def load(block: Block) -> None:
        found = block.load(space, address(block), len(names), DTYPES[kind])
        for name, value in zip(names, found, strict=True):
            _write(name, _widened(name, value), block)

    return load


def _widened(name: str, value: Array) -> Array:
    """A register may have more bits than what is loaded into it."""
    kept = _kept_as(name)
    return value.astype(kept) if value.dtype.itemsize < np.dtype(kept).itemsize else value


def _store(parts: list[str], operands: list[str], params: list[tuple[str, str]]) -> Act:
    space = parts[1].split("::")[0].split(":")[0]
    address = _address(operands[0], 64 if space == "global" else 32)
    values = [_narrow(name, parts[-1]) for name in _names(operands[1])]
    return lambda block: block.store(space, address(block), [value(block) for value in values])


def _narrow(name: str, kind: str) -> Read:
    if kind.endswith("8"):
        value = _read(name, "u16")
        return lambda block: value(block).astype(np.uint8)
    return _read(name, kind)


def _copy(parts: list[str], operands: list[str], params: list[tuple[str, str]]) -> Act:
    assert parts[1] == "async", parts
    if parts[2] == "commit_group":
        return Block.commit
    if parts[2] == "wait_group":
        left = int(operands[0], 0)
        return lambda block: block.wait(left)
    if parts[2] == "wait_all":
        return lambda block: (block.commit(), block.wait(0))[-1]  # type: ignore[func-returns-value]
    target, source, size = _address(operands[0], 32), _address(operands[1], 64), int(operands[2], 0)
    wanted = _read(operands[3], "u32") if len(operands) > 3 else None
    return lambda block: block.copy(target(block), source(block), size, None if wanted is None else wanted(block))


MEMORY: dict[str, Callable[..., Act]] = {"ld": _load, "st": _store, "cp": _copy}


def _barrier(parts: list[str], operands: list[str]) -> Act:
    return _nothing if parts[1] == "warp" else lambda block: block.shared.barrier()


def _shuffle(parts: list[str], operands: list[str]) -> Act:
    value, by = _read(operands[1], "b32"), _read(operands[2], "b32")
    return lambda block: _write(operands[0], block.shuffle(parts[2], value(block), by(block)), block)


REDUCTIONS: dict[str, Any] = {
    **{"min": np.minimum, "max": np.maximum, "add": np.add},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


def _reduce(parts: list[str], operands: list[str]) -> Act:
    function = REDUCTIONS[parts[2]]
    value = _read(operands[1], parts[-1])
    return lambda block: _write(operands[0], block.reduce(function, value(block)), block)


def _matrices(parts: list[str], operands: list[str]) -> Act:
    names, address = _names(operands[0]), _address(operands[1], 32)

    def load(block: Block) -> None:
        found = block.load_matrices(address(block), len(names), "trans" in parts)
        for name, value in zip(names, found, strict=True):
            _write(name, value, block)

    return load


def _multiply(parts: list[str], operands: list[str]) -> Act:
    names = _names(operands[0])
    fragments = [[_read(name, "b32") for name in _names(operand)] for operand in operands[1:]]
    (kind,) = {part for part in parts if part in ("tf32", "bf16", "f16")}

    def multiply(block: Block) -> None:
        a, b, c = ([x(block) for x in fragment] for fragment in fragments)
        found = block.multiply(a, b, c, kind)
        for name, value in zip(names, found, strict=True):
            _write(name, value, block)

    return multiply


def _fence(parts: list[str], operands: list[str]) -> Act:
    return _nothing


TOGETHER: dict[str, Callable[..., Act]] = {
    **{"bar": _barrier, "barrier": _barrier, "shfl": _shuffle, "ldmatrix": _matrices, "mma": _multiply},
    **{"redux": _reduce, "membar": _fence, "fence": _fence},
}

# --- values: what an instruction writes to its first operand ------------------------------------------------------


def _simple(function: Callable[..., Array]) -> Callable[..., Read]:
    """An instruction whose operands and result are of one kind."""

    def make(parts: list[str], operands: list[str]) -> Read:
        kind = parts[-1]
        values = [_read(operand, kind) for operand in operands[1:]]
        return lambda block: np.asarray(function(*(value(block) for value in values)), DTYPES[kind])

    return make


def _mov(parts: list[str], operands: list[str]) -> Read:
    """Also into several registers, or out of them."""
    if operands[1].startswith("{"):
        names = _names(operands[1])
        return lambda block: np.stack([block.registers[name] for name in names], 1).view(DTYPES[parts[-1]]).reshape(-1)
    return _read(operands[1], parts[-1])


def _product(parts: list[str], operands: list[str]) -> Read:
    """mul and mad: of whole numbers the low half, the high half or all of the product."""
    kind = parts[-1]
    wide, high = "wide" in parts, "hi" in parts
    out = kind[0] + str(2 * int(kind[1:])) if wide or high else kind
    x, y = (_read(operand, kind) for operand in operands[1:3])
    more = _read(operands[3], out if wide else kind) if len(operands) > 3 else None

    def value(block: Block) -> Array:
        product: Array = x(block).astype(DTYPES[out]) * y(block).astype(DTYPES[out])
        if high:
            product = (product >> DTYPES[out](int(kind[1:]))).astype(DTYPES[kind])
        return product if more is None else product + more(block)

    return value


def _fma(parts: list[str], operands: list[str]) -> Read:
    """Rounded once."""
    assert parts[-1] == "f32", parts
    x, y, z = (_read(operand, "f32") for operand in operands[1:])
    return lambda block: (x(block).astype(np.float64) * y(block) + z(block)).astype(np.float32)


COMPARE: dict[str, Callable[..., Array]] = {
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal},
    **{"ne": np.not_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}


def _setp(parts: list[str], operands: list[str]) -> Read:
    how, kind = parts[1], parts[-1]
    x, y = (_read(operand, kind) for operand in operands[1:3])
    if not kind.startswith("f"):
        return lambda block: COMPARE[how](x(block), y(block))
    unordered = how in ("ltu", "leu", "gtu", "geu", "equ", "neu", "nan")

    def value(block: Block) -> Array:
        a, b = x(block), y(block)
        nan = np.isnan(a) | np.isnan(b)
        if how in ("num", "nan"):
            return nan if unordered else ~nan
        result: Array = COMPARE[how[:2]](a, b)
        return result | nan if unordered else result & ~nan

    return value


def _selp(parts: list[str], operands: list[str]) -> Read:
    x, y, choice = _read(operands[1], parts[-1]), _read(operands[2], parts[-1]), _read(operands[3], "pred")
    return lambda block: np.where(choice(block), x(block), y(block))


def _cvt(parts: list[str], operands: list[str]) -> Read:
    target, source = parts[-2], parts[-1]
    if target in ("bf16x2", "f16x2"):
        high, low = (_cvt([*parts[:-2], target[:-2], source], ["", operand]) for operand in operands[1:])
        return lambda block: (
            (high(block).view(np.uint16).astype(np.uint32) << np.uint32(16))
            | low(block).view(np.uint16).astype(np.uint32)
        )
    value = _read(operands[1], source)
    if target == "tf32":
        bits = _read(operands[1], "b32")
        return lambda block: (bits(block) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    if target == "bf16":
        return lambda block: to_bf16(value(block))
    if source == "bf16":
        return lambda block: from_bf16(value(block))
    rounding = {"rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc, "rni": np.rint}
    before = next((rounding[part] for part in parts if part in rounding), lambda x: x)
    return lambda block: before(value(block)).astype(DTYPES[target])


def _shift(left: bool) -> Callable[..., Read]:
    def make(parts: list[str], operands: list[str]) -> Read:
        kind = parts[-1]
        bits = np.dtype(DTYPES[kind]).itemsize * 8
        x, by = _read(operands[1], kind), _read(operands[2], "u32")

        def value(block: Block) -> Array:
            amount = by(block)
            if left or kind[0] != "s":  # by as much as there are bits, or more, nothing is left
                moved = (np.left_shift if left else np.right_shift)(x(block), (amount % bits).astype(DTYPES[kind]))
                return np.asarray(np.where(amount >= bits, DTYPES[kind](0), moved))
            return np.asarray(np.right_shift(x(block), np.minimum(amount, bits - 1).astype(DTYPES[kind])))

        return value

    return make


def _bfe(parts: list[str], operands: list[str]) -> Read:
    x, (start, length) = _read(operands[1], parts[-1]), (int(operand, 0) for operand in operands[2:])
    bits = np.dtype(DTYPES[parts[-1]]).itemsize * 8
    up, down = DTYPES[parts[-1]](bits - start - length), DTYPES[parts[-1]](bits - length)
    return lambda block: (x(block) << up) >> down


def _prmt(parts: list[str], operands: list[str]) -> Read:
    """Bytes of two registers, chosen by the digits of the third operand."""
    low, high, chosen = (_read(operand, "b32") for operand in operands[1:4])

    def value(block: Block) -> Array:
        every = low(block).astype(np.uint64) | (high(block).astype(np.uint64) << np.uint64(32))
        out = np.zeros(block.threads, np.uint32)
        for i in range(4):
            digit = (chosen(block) >> np.uint32(4 * i)) & np.uint32(15)
            byte = (every >> (np.uint64(8) * (digit & np.uint32(7)).astype(np.uint64))).astype(np.uint32) & np.uint32(
                255
            )
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            out |= np.where(digit & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return out

    return value


def _quotient(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return x / y
    safe = np.where(y == 0, 1, y).astype(y.dtype)
    return np.asarray((x - np.fmod(x, safe)) // safe, x.dtype)


def _extreme(of_numbers: Any, with_nan: Any) -> Callable[..., Read]:
    def make(parts: list[str], operands: list[str]) -> Read:
        return _simple(with_nan if "NaN" in parts or parts[-1][0] != "f" else of_numbers)(parts, operands)

    return make


VALUES: dict[str, Callable[..., Read]] = {
    **{"mov": _mov, "mul": _product, "mad": _product, "fma": _fma, "setp": _setp, "selp": _selp, "cvt": _cvt},
    **{"shl": _shift(left=True), "shr": _shift(left=False), "bfe": _bfe, "prmt": _prmt},
    **{"add": _simple(np.add), "sub": _simple(np.subtract), "neg": _simple(np.negative), "abs": _simple(np.abs)},
    **{"and": _simple(np.bitwise_and), "or": _simple(np.bitwise_or), "xor": _simple(np.bitwise_xor)},
    **{"not": _simple(np.invert), "div": _simple(_quotient), "rem": _simple(np.fmod)},
    **{"ex2": _simple(np.exp2), "lg2": _simple(np.log2), "rcp": _simple(np.reciprocal), "sqrt": _simple(np.sqrt)},
    **{"min": _extreme(np.fmin, np.minimum), "max": _extreme(np.fmax, np.maximum)},
    **{"cvta": _mov},
}
