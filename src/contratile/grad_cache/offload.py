"""Keeps chunks until their second pass: where they are, in host memory, or on disk.

    with make_store("disk", directory=None) as store:
        slots = [store.put(chunk, device) for chunk in chunks]
        for chunk in store.fetch(slots, store.get):        # reads one ahead in the background
            ...

The file has no name, so the system frees it when the process ends, even if it is killed. It is read and written rather
than memory-mapped: mapped pages count as resident memory, and a full disk would kill the process instead of raising.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from contratile.grad_cache.chunks import Nest, map_tensors

Offload = Literal["none", "host", "disk"]
OFFLOADS = ("none", "host", "disk")
Slot = Any
"""Handle that `put` returns and `get` takes."""
T = TypeVar("T")
R = TypeVar("R")


class ChunkStore:
    """Keeps chunks where they are; base class of the stores that offload."""

    def put(self, nest: Nest, device: torch.device | None = None) -> Slot:
        """Store a nest. `get` will return its tensors on `device`, by default on their present device."""
        return nest

    def get(self, slot: Slot) -> Nest:
        """Return a stored nest."""
        return slot

    def bring(self, nest: Nest, device: torch.device | None) -> Nest:
        """Move a nest to its encoder's device for the first pass, if chunks are offloaded."""
        return nest

    def fetch(self, items: Iterable[T], load: Callable[[T], R]) -> Iterator[R]:
        """Yield `load(item)` for all items, in order."""
        return map(load, items)

    def close(self) -> None:
        """Release everything."""

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OffloadedTensor(NamedTuple):
    """Where a tensor is kept, and the device to load it to."""

    content: Any
    device: torch.device


class HostStore(ChunkStore):
    """Keeps tensors in host memory, pinned if they will be loaded to CUDA."""

    def put(self, nest: Nest, device: torch.device | None = None) -> Slot:
        return map_tensors(lambda x: OffloadedTensor(self._keep(x, device or x.device), device or x.device), nest)

    def get(self, slot: Slot) -> Nest:
        return map_tensors(lambda kept: self._load(kept.content, kept.device), slot, OffloadedTensor)

    def _keep(self, x: Tensor, device: torch.device) -> Any:
        x = x.detach()
        if device.type != "cuda":
            return x.cpu()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)

    def _load(self, content: Any, device: torch.device) -> Tensor:
        loaded: Tensor = content.to(device, non_blocking=True)
        return loaded

    def bring(self, nest: Nest, device: torch.device | None) -> Nest:
        return nest if device is None else map_tensors(lambda x: x.to(device, non_blocking=True), nest)

    def fetch(self, items: Iterable[T], load: Callable[[T], R]) -> Iterator[R]:
        """Like the base class, loading one item ahead in a background thread."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="contratile-prefetch") as worker:
            waiting: Future[R] | None = None
            for item in items:
                following = worker.submit(load, item)
                if waiting is not None:
                    yield waiting.result()
                waiting = following
            if waiting is not None:
                yield waiting.result()


class FilePosition(NamedTuple):
    """Where a tensor is stored in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class DiskStore(HostStore):
    """Keeps tensors in an unnamed temporary file."""

    def __init__(self, directory: str | Path | None) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=directory, prefix="contratile-", buffering=0)
        self.end = 0

    def _keep(self, x: Tensor, device: torch.device) -> FilePosition:
        x = x.detach().cpu().contiguous()
        place = FilePosition(self.end, tuple(x.shape), x.dtype)
        if x.nbytes:
            left = _bytes_of(x)
            self.file.seek(self.end)
            while left:
                left = left[self.file.write(left) :]
            self.end += x.nbytes
        return place

    def _load(self, content: FilePosition, device: torch.device) -> Tensor:
        x = torch.empty(content.shape, dtype=content.dtype, pin_memory=device.type == "cuda")
        if x.nbytes:
            left = _bytes_of(x)
            self.file.seek(content.offset)
            while left:
                left = left[self.file.readinto(left) or _short() :]  # type: ignore[attr-defined]
        return super()._load(x, device)

    def close(self) -> None:
        self.file.close()

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.close()


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())).cast("B")


def _short() -> int:
    raise OSError("the file of offloaded chunks ended early")


def make_store(offload: Offload, directory: str | Path | None) -> ChunkStore:
    """The store for an `offload` option of `GradCache`."""
    if offload == "disk":
        return DiskStore(directory)
    return HostStore() if offload == "host" else ChunkStore()
