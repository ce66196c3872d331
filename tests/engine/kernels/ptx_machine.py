"""A thread block as `ptx_emulator` sees it: registers of all its threads, memories, tensor cores.

Threads run in lockstep, a register is an array with an element for each of them. What a real GPU leaves undefined is
refused here: global accesses outside of the tensors that were passed, shared memory that is read before it was written
(it begins as NaN), that another warp wrote or reads without a barrier between (`Hazard`), or that a copy is on its way
to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.kernels.floats import Array, from_bf16, to_tf32

WARP = 32
NAN = 0x7FC0
"""As bf16 and fp16, and twice as fp32."""


class Hazard(AssertionError):
    """Two warps, or a warp and a copy, meet in shared memory without a barrier between them."""


class GlobalMemory:
    """The storages of some tensors, each at an address of its own with nothing around it."""

    START = 1 << 40
    GAP = 512

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.places: dict[int, int] = {}
        self.storages: list[tuple[int, Tensor]] = []
        valid = [torch.zeros(self.GAP, dtype=torch.bool)]
        used = self.GAP
        for tensor in tensors:
            key = tensor.untyped_storage().data_ptr()
            if key not in self.places:
                self.places[key] = used
                content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.storages.append((used, content))
                size = -(-len(content) // 256) * 256 + self.GAP
                valid.append(torch.zeros(size, dtype=torch.bool))
                used += size
        self.valid = torch.cat(valid)
        self.bytes = np.full(used, 0xFF, np.uint8)
        for place, content in self.storages:
            self.bytes[place : place + len(content)] = content.numpy()
        for tensor in tensors:
            start, item = self.address(tensor) - self.START, tensor.element_size()
            shape, strides = (*tensor.shape, item), (*(item * stride for stride in tensor.stride()), 1)
            self.valid.as_strided(shape, strides, start).fill_(True)
        self.is_valid = self.valid.numpy()

    def address(self, tensor: Tensor) -> int:
        place = self.places[tensor.untyped_storage().data_ptr()]
        return self.START + place + int(tensor.storage_offset()) * tensor.element_size()

    def at(self, addresses: Array, size: int) -> Array:
        """The bytes of accesses of `size` bytes, [lanes, size]."""
        begin = (addresses - np.uint64(self.START)).astype(np.int64)
        within = (begin >= 0) & (begin + size <= len(self.bytes)) & (begin % min(size, 16) == 0)
        every: Array = np.where(within, begin, 0)[:, None] + np.arange(size)
        if not (within.all() and self.is_valid[every].all()):
            raise IndexError(f"global memory: {int((~self.is_valid[every].all(1)).sum())} lanes outside of all tensors")
        return every

    def write_back(self) -> None:
        for place, content in self.storages:
            content.copy_(torch.from_numpy(self.bytes[place : place + len(content)].copy()))


class SharedMemory:
    """Bytes of a block, and for each pair of bytes who wrote and read it since the last barrier."""

    NOBODY, SEVERAL = -1, -2

    def __init__(self, size: int) -> None:
        size = max(16, -(-size // 16) * 16)
        self.bytes = np.full(size // 2, NAN, np.uint16).view(np.uint8)
        self.writer = np.full(size // 2, self.NOBODY, np.int64)
        self.reader = np.full(size // 2, self.NOBODY, np.int64)
        self.coming = np.zeros(size // 2, np.bool_)

    def barrier(self) -> None:
        self.writer[:] = self.reader[:] = self.NOBODY

    def at(self, addresses: Array, size: int) -> Array:
        begin = addresses.astype(np.int64)
        if begin.size and (begin.min() < 0 or begin.max() + size > len(self.bytes) or (begin % min(size, 16)).any()):
            raise IndexError("shared memory: access outside of it, or not aligned")
        every: Array = begin[:, None] + np.arange(size)
        return every

    def reads(self, at: Array, warps: Array) -> None:
        pairs, warps = _pairs(at, warps)
        self._refuse(self.coming[pairs], "is read while a copy to it is under way")
        self._refuse(_others(self.writer[pairs], warps), "is read after another warp wrote it, without a barrier")
        before = self.reader[pairs]
        self.reader[pairs] = np.where((before == self.NOBODY) | (before == warps), warps, self.SEVERAL)

    def writes(self, at: Array, warps: Array) -> None:
        pairs, warps = _pairs(at, warps)
        self._refuse(self.coming[pairs], "is written while a copy to it is under way")
        self._refuse(
            _others(self.reader[pairs], warps), "is written after another warp read it, with no barrier between"
        )
        self.writer[pairs] = warps

    @staticmethod
    def _refuse(bad: Array, what: str) -> None:
        if bad.any():
            raise Hazard(f"shared memory {what}")


def _pairs(at: Array, warps: Array) -> tuple[Array, Array]:
    pairs = at[:, ::2] // 2
    return pairs, np.broadcast_to(warps[:, None], pairs.shape)


def _others(who: Array, warps: Array) -> Array:
    result: Array = (who != SharedMemory.NOBODY) & (who != warps)
    return result


class Block:
    """A thread block between its first and its last instruction."""

    def __init__(self, threads: int, shared: int, memory: GlobalMemory, special: dict[str, int]) -> None:
        self.threads, self.memory, self.shared = threads, memory, SharedMemory(shared)
        thread = np.arange(threads, dtype=np.uint32)
        self.warps = (thread // WARP).astype(np.int64)
        self.registers: dict[str, Array] = {
            "%tid.x": thread,
            "%laneid": thread % np.uint32(WARP),
            **{name: np.full(threads, value, np.uint32) for name, value in special.items()},
        }
        self.mask: Array | None = None
        """The lanes that the present instruction is for; None: all."""
        self.copies: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    # --- memory

    def load(self, space: str, addresses: Array, count: int, dtype: Any) -> list[Array]:
        """`count` numbers for each lane."""
        lanes = self._lanes()
        item = np.dtype(dtype).itemsize
        if space == "global":
            data = self.memory.bytes[self.memory.at(addresses[lanes], count * item)]
        else:
            at = self.shared.at(addresses[lanes], count * item)
            self.shared.reads(at, self.warps[lanes])
            data = self.shared.bytes[at]
        out = np.zeros((self.threads, count), dtype)
        out[lanes] = data.view(dtype)
        return [np.ascontiguousarray(column) for column in out.T]

    def store(self, space: str, addresses: Array, values: list[Array]) -> None:
        lanes = self._lanes()
        columns = [np.broadcast_to(value, self.threads) for value in values]
        data = np.ascontiguousarray(np.stack(columns, 1)[lanes]).view(np.uint8)
        if space == "global":
            self.memory.bytes[self.memory.at(addresses[lanes], data.shape[1])] = data
        else:
            at = self.shared.at(addresses[lanes], data.shape[1])
            self.shared.writes(at, self.warps[lanes])
            self.shared.bytes[at] = data

    def _lanes(self) -> Array:
        return np.arange(self.threads) if self.mask is None else np.flatnonzero(self.mask)

    def copy(self, target: Array, source: Array, size: int, wanted: Array | None) -> None:
        """Begin a copy from global to shared memory; lanes that want 0 bytes of it get zeros."""
        lanes = self._lanes()
        at = self.shared.at(target[lanes], size)
        self.shared.writes(at, self.warps[lanes])
        data = np.zeros((len(lanes), size), np.uint8)
        reads = np.ones(len(lanes), np.bool_) if wanted is None else np.broadcast_to(wanted, self.threads)[lanes] > 0
        data[reads] = self.memory.bytes[self.memory.at(source[lanes][reads], size)]
        self.shared.coming[at[:, ::2] // 2] = True
        self.shared.bytes[at] = np.array([NAN & 255, NAN >> 8] * (size // 2), np.uint8)

        def arrive() -> None:
            self.shared.coming[at[:, ::2] // 2] = False
            self.shared.bytes[at] = data
            self.shared.writer[at[:, ::2] // 2] = self.warps[lanes][:, None]

        self.copies.append(arrive)

    def commit(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait(self, left: int) -> None:
        """Let all but the last `left` groups of copies arrive."""
        while len(self.groups) > left:
            for arrive in self.groups.pop(0):
                arrive()

    def load_matrices(self, addresses: Array, count: int, transposed: bool) -> list[Array]:
        """ldmatrix: lane 8 i + j of a warp gives the address of row j of its 8 x 8 matrix i of 16-bit numbers."""
        at = self.shared.at(addresses[np.arange(self.threads) % WARP < 8 * count], 16)
        self.shared.reads(at, self.warps[np.arange(self.threads) % WARP < 8 * count])
        rows = self.shared.bytes[at].view(np.uint16).reshape(-1, count, 8, 8)  # [warps, matrices, rows, columns]
        if transposed:
            rows = rows.swapaxes(2, 3)
        lane = np.arange(WARP)
        pairs = rows[:, :, lane // 4].reshape(len(rows), count, WARP, 4, 2)[:, :, lane, lane % 4]
        words = np.ascontiguousarray(pairs).view(np.uint32)[..., 0]  # [warps, matrices, lanes]
        return [np.ascontiguousarray(words[:, i]).reshape(-1) for i in range(count)]

    # --- between lanes

    def shuffle(self, mode: str, x: Array, by: Array) -> Array:
        lane, by = self.registers["%laneid"].astype(np.int64), np.broadcast_to(by, self.threads).astype(np.int64)
        source = {"bfly": lane ^ by, "idx": by % WARP, "down": lane + by, "up": lane - by}[mode]
        source = np.where((source < 0) | (source >= WARP), lane, source)
        result: Array = np.broadcast_to(x, self.threads)[self.warps * WARP + source]
        return result

    def reduce(self, function: Any, x: Array) -> Array:
        """Of all lanes of a warp, to all of them."""
        result: Array = np.repeat(function.reduce(x.reshape(-1, WARP), axis=1).astype(x.dtype), WARP)
        return result

    def multiply(self, a: list[Array], b: list[Array], c: list[Array], kind: str) -> list[Array]:
        """mma.m16n8: fragments of [16, K] and [K, 8] in registers, added to a fragment of [16, 8]."""
        width = 1 if kind == "tf32" else 2
        lane, depth = np.arange(WARP), 4 * width * len(b)
        left = np.empty((self.threads // WARP, 16, depth), np.float32)
        right = np.empty((self.threads // WARP, depth, 8), np.float32)
        for i, register in enumerate(a):
            for j, numbers in enumerate(_unpack(register, kind)):
                column = width * (lane % 4) + j + 4 * width * (i // 2)
                left[:, lane // 4 + 8 * (i % 2), column] = numbers.reshape(-1, WARP)
        for i, register in enumerate(b):
            for j, numbers in enumerate(_unpack(register, kind)):
                right[:, width * (lane % 4) + j + 4 * width * i, lane // 4] = numbers.reshape(-1, WARP)
        product = left @ right
        out = []
        for i, register in enumerate(c):
            before = np.broadcast_to(register, self.threads).view(np.float32).reshape(-1, WARP)
            after = product[:, lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] + before
            out.append(after.reshape(-1).view(np.uint32))
        return out


def _unpack(register: Array, kind: str) -> list[Array]:
    """The numbers in a 32-bit register of an operand."""
    if kind == "tf32":  # tensor cores do not read the low bits
        return [to_tf32(register.view(np.float32))]
    halves = [(register & np.uint32(0xFFFF)).astype(np.uint16), (register >> np.uint32(16)).astype(np.uint16)]
    if kind == "f16":
        return [half.view(np.float16).astype(np.float32) for half in halves]
    return [from_bf16(half) for half in halves]
