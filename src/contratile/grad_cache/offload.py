"""Where chunks wait for their second pass: where they are, in host memory, or on disk.

    with make_shelf("disk", directory=None) as shelf:
        slots = [shelf.put(chunk, device) for chunk in chunks]
        for chunk in shelf.fetch(slots, shelf.get):        # read one ahead in the background
            ...

The file has no name: the system frees it when it is closed or when the process ends, whatever ended it. It is read and
written by plain calls, as mapped pages would count as resident, and a full disk would kill instead of raising.
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
"""What `put` returns and `get` takes."""
T = TypeVar("T")
R = TypeVar("R")


class Shelf:
    """Keeps nests as they are."""

    def put(self, nest: Nest, device: torch.device | None = None) -> Slot:
        """Keep a nest; `device` is where `get` shall bring its tensors, by default where they are."""
        return nest

    def get(self, slot: Slot) -> Nest:
        return slot

    def bring(self, nest: Nest, device: torch.device | None) -> Nest:
        """A nest for its first pass: what is offloaded comes to the device of its encoder."""
        return nest

    def fetch(self, items: Iterable[T], load: Callable[[T], R]) -> Iterator[R]:
        """`load` of every item, in order."""
        return map(load, items)

    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Kept(NamedTuple):
    """A tensor that is elsewhere, and the device it shall come to."""

    content: Any
    device: torch.device


class HostShelf(Shelf):
    """Keeps tensors in host memory, pinned if they are to go to CUDA."""

    def put(self, nest: Nest, device: torch.device | None = None) -> Slot:
        return map_tensors(lambda x: Kept(self._keep(x, device or x.device), device or x.device), nest)

    def get(self, slot: Slot) -> Nest:
        return map_tensors(lambda kept: self._load(kept.content, kept.device), slot, Kept)

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
        """One item ahead, in a background thread."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="contratile-prefetch") as worker:
            waiting: Future[R] | None = None
            for item in items:
                following = worker.submit(load, item)
                if waiting is not None:
                    yield waiting.result()
                waiting = following
            if waiting is not None:
                yield waiting.result()


class Place(NamedTuple):
    """Where a tensor is in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class DiskShelf(HostShelf):
    """Keeps tensors in a file without a name."""

    def __init__(self, directory: str | Path | None) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=directory, prefix="contratile-", buffering=0)
        self.end = 0

    def _keep(self, x: Tensor, device: torch.device) -> Place:
        x = x.detach().cpu().contiguous()
        place = Place(self.end, tuple(x.shape), x.dtype)
        if x.nbytes:
            left = _bytes_of(x)
            self.file.seek(self.end)
            while left:
                left = left[self.file.write(left) :]
            self.end += x.nbytes
        return place

    def _load(self, content: Place, device: torch.device) -> Tensor:
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


def make_shelf(offload: Offload, directory: str | Path | None) -> Shelf:
    if offload == "disk":
        return DiskShelf(directory)
    return HostShelf() if offload == "host" else Shelf()
