"""Cuts the inputs of a step into chunks, each paired with its encoder.

feed = Feed((image_encoder, text_encoder), chunk_size=64)
sides = feed.sides((images, texts))
for side, chunk in feed.chunks(sides, (images, texts)):
    side.encode(chunk)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import nn

from contratile.errors import bad_type, bad_value, check_choice, check_count
from contratile.grad_cache.auto import Trial, largest_chunk
from contratile.grad_cache.chunks import Encoder, Nest, blocks, count_rows, cut, is_whole, joint_blocks
from contratile.grad_cache.encoded import EncoderSide
from contratile.grad_cache.wrappers import check_equal_counts, is_sharded, wrappers_of
from contratile.ring.team import Group, Team

ChunkSize: TypeAlias = "int | Sequence[int] | Literal['auto']"


class Feed:
    """Pairs inputs with encoders and cuts them into chunks. Arguments are those of `GradCache`."""

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        chunk_size: ChunkSize = "auto",
        *,
        select: Callable[[Any], Any] | None = None,
        memory_limit: int | None = None,
        group: Group = "auto",
    ) -> None:
        self.shared = callable(encoders)
        self.encoders: list[Encoder] = [encoders] if callable(encoders) else list(encoders)
        for encoder in self.encoders:
            _owner(encoder)
        self.chunk_size = _check_chunk_size(chunk_size)
        self.select, self.memory_limit, self.group = select, memory_limit, group
        self.found: dict[int, int] = {}
        """Chunk sizes that "auto" found, by input; reused in later steps."""

    def sides(self, inputs: tuple[Nest, ...]) -> list[EncoderSide]:
        """One side per encoder, or per input if they share an encoder."""
        encoders = self.encoders * len(inputs) if self.shared else self.encoders
        together = len(inputs) == 1 < len(encoders) and not is_whole(inputs[0])
        if not inputs or (len(inputs) != len(encoders) and not together):
            remedy = "Or pass one iterator that yields tuples with a chunk for each encoder."
            bad_value("inputs", expected=f"one for each of {len(encoders)} encoders", got=len(inputs), remedy=remedy)
        if isinstance(self.chunk_size, tuple) and len(self.chunk_size) != len(encoders):
            expected = f"one for each of {len(encoders)} inputs"
            bad_value("chunk_size", expected=expected, got=len(self.chunk_size), remedy="Or pass one number for all.")
        sides = []
        for index, encoder in enumerate(encoders):
            given = None if together else inputs[index]
            total = count_rows(given, f"input {index}") if is_whole(given) else None
            owner = _owner(encoder)
            sides.append(EncoderSide(index, encoder, self.select, owner, wrappers_of(owner), total))
        return sides

    def chunks(self, sides: list[EncoderSide], inputs: tuple[Nest, ...]) -> Iterator[tuple[EncoderSide, Nest]]:
        """Yield chunks in the order in which they are encoded."""
        self._check_sharded(sides)
        for side, block in self._blocks(sides, inputs):
            for chunk in cut(block, self._size(side, block), f"input {side.index}"):
                yield side, chunk

    def _blocks(self, sides: list[EncoderSide], inputs: tuple[Nest, ...]) -> Iterator[tuple[EncoderSide, Nest]]:
        if len(inputs) < len(sides):
            for item in joint_blocks(inputs[0], len(sides)):
                yield from zip(sides, item, strict=True)
            return
        for side, given in zip(sides, inputs, strict=True):
            for block in blocks(given, f"input {side.index}"):
                yield side, block

    def _size(self, side: EncoderSide, block: Nest) -> int:
        if isinstance(self.chunk_size, int):
            return self.chunk_size
        if isinstance(self.chunk_size, tuple):
            return self.chunk_size[side.index]
        if side.index not in self.found:
            trial = Trial(side, block)
            most = count_rows(block, f"input {side.index}")
            self.found[side.index] = largest_chunk(trial.cost, most=most, limit=trial.limit(self.memory_limit))
        return self.found[side.index]

    def _check_sharded(self, sides: list[EncoderSide]) -> None:
        """Forward passes of FSDP are collective, so all ranks need the same number of chunks; checked if known."""
        if not any(is_sharded(wrapper) for side in sides for wrapper in side.wrappers):
            return
        if self.chunk_size == "auto":
            remedy = "Pass a number: trial runs would leave gradients in the shards."
            bad_value("chunk_size", expected="a number for FSDP encoders", got="'auto'", remedy=remedy)
        count = sum(-(-side.total // self._size(side, None)) for side in sides if side.total is not None)
        check_equal_counts(count, Team.of(self.group), sides[0].device)


def _owner(encoder: Encoder) -> nn.Module:
    """The module that an encoder is, or is a method of."""
    while isinstance(encoder, partial):
        encoder = encoder.func
    owner = getattr(encoder, "__self__", encoder)
    if not isinstance(owner, nn.Module):
        remedy = "Wrap it in an nn.Module, so that its parameters and buffers are known."
        expected = "a module, a method of one, or functools.partial of these"
        bad_type("encoders", expected=expected, got=type(encoder).__name__, remedy=remedy)
    return owner


def _check_chunk_size(chunk_size: ChunkSize) -> int | tuple[int, ...] | Literal["auto"]:
    if isinstance(chunk_size, str):
        check_choice("chunk_size", chunk_size, ("auto",))
        return "auto"
    if isinstance(chunk_size, tuple | list):
        for size in chunk_size:
            check_count("chunk_size", size, least=1)
        return tuple(chunk_size)
    check_count("chunk_size", chunk_size, least=1)
    assert isinstance(chunk_size, int)
    return chunk_size
