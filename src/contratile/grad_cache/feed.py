"""Cuts the inputs of a step into chunks, each paired with its encoder.

feed = Feed((image_encoder, text_encoder), chunk_size=64)
agenda = feed.agenda((images, texts))
for item in agenda.items:
    item.side.encode(item.chunk())
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn

from contratile.errors import bad_type, bad_value, check_choice, check_count
from contratile.grad_cache.auto import Trial, largest_chunk
from contratile.grad_cache.chunks import Encoder, Nest, blocks, count_rows, is_whole, joint_blocks
from contratile.grad_cache.encoded import EncoderSide, RowIndex
from contratile.grad_cache.lengths import ByLength, Pool, SplitPool, token_columns
from contratile.grad_cache.plan import Padding, Piece, by_length, by_rows, in_pieces
from contratile.grad_cache.rows import Rows as SplitRows
from contratile.grad_cache.rows import SplitFn
from contratile.grad_cache.sorting import Sorting
from contratile.grad_cache.wrappers import check_equal_counts, is_collective, wrappers_of
from contratile.ring.team import Group, Team

ChunkSize: TypeAlias = "int | Sequence[int] | Literal['auto']"


class Item(NamedTuple):
    """A chunk to encode."""

    side: EncoderSide
    pool: Pool
    piece: Piece
    offset: int
    """Number of the pool's first row among all rows of the side."""

    def chunk(self) -> Nest:
        """The inputs."""
        return self.pool.chunk(self.piece)

    @property
    def rows(self) -> RowIndex:
        """Its rows among all rows of the side."""
        span = self.piece.span
        if span is None:
            return self.piece.rows + self.offset
        return slice(span.start + self.offset, span.stop + self.offset)


@dataclass
class Agenda:
    """The chunks of a step."""

    sides: list[EncoderSide]
    items: Iterator[Item]
    known: list[Item] | None
    """All items, if the inputs are given as a whole (not as iterators)."""

    padding: Padding
    """Tokens of the items so far."""


class Feed:
    """Pairs inputs with encoders and cuts them into chunks. Arguments are those of `GradCache`."""

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        chunk_size: ChunkSize = "auto",
        *,
        chunk_tokens: int | None = None,
        lengths: Literal["auto", "off"] | ByLength = "auto",
        split_fn: SplitFn | Sequence[SplitFn | None] | None = None,
        select: Callable[[Any], Any] | None = None,
        memory_limit: int | None = None,
        group: Group = "auto",
    ) -> None:
        self.shared = callable(encoders)
        self.encoders: list[Encoder] = [encoders] if callable(encoders) else list(encoders)
        for encoder in self.encoders:
            owner_of(encoder)
        self.chunk_size, self.chunk_tokens = _check_chunk_size(chunk_size), chunk_tokens
        if chunk_tokens is not None:
            check_count("chunk_tokens", chunk_tokens, least=1)
        self.sorting = Sorting(lengths, group)
        if memory_limit is not None:
            check_count("memory_limit", memory_limit, least=0)
        self.split_fn = split_fn
        self.select, self.memory_limit, self.group = select, memory_limit, group
        self.found: dict[int, int] = {}
        """Chunk sizes that "auto" found, by input; reused in later steps."""

    def agenda(self, inputs: tuple[Nest, ...]) -> Agenda:
        """The chunks of a step, in the order in which they are encoded."""
        sides = self._sides(inputs)
        agenda = Agenda(sides, iter(()), None, Padding())
        if len(inputs) == len(sides) and all(map(self._is_whole, range(len(inputs)), inputs)):
            self.sorting.check_named(inputs)
            agenda.sides, pools = self._pools(sides, inputs)
            agenda.known = [
                x for side, pool in zip(agenda.sides, pools, strict=True) for x in self._cut(agenda, side, pool)
            ]
            self._check_sharded(agenda.sides, len(agenda.known))
            agenda.items = iter(agenda.known)
        else:
            self._check_sharded(sides, 0)
            agenda.items = self._read(agenda, inputs)
        return agenda

    def _sides(self, inputs: tuple[Nest, ...]) -> list[EncoderSide]:
        """One side per encoder, or per input if they share an encoder."""
        encoders = self.encoders * len(inputs) if self.shared else self.encoders
        if isinstance(self.split_fn, Sequence) and len(self.split_fn) != len(encoders):
            expected = f"one for each of {len(encoders)} inputs"
            bad_value("split_fn", expected=expected, got=len(self.split_fn), remedy="None for inputs of plain rows.")
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
            plain = is_whole(given) and self._split(index) is None
            total = count_rows(given, f"input {index}") if plain else None
            owner = owner_of(encoder)
            sides.append(EncoderSide(index, encoder, self.select, owner, wrappers_of(owner), total))
        return sides

    # --- batches given as a whole -------------------------------------------------------------------------------------

    def _pools(self, sides: list[EncoderSide], inputs: tuple[Nest, ...]) -> tuple[list[EncoderSide], list[Pool]]:
        """A pool for each side, or one for all inputs if one encoder serves them and their rows can be joined."""
        one_size = not isinstance(self.chunk_size, tuple) or len(set(self.chunk_size)) == 1
        plain = self.split_fn is None
        if plain and len(sides) > 1 and one_size and all(side.encoder == sides[0].encoder for side in sides[1:]):
            pool = self.sorting.joined(sides[0], inputs)
            if pool is not None:
                first = sides[0]
                counts = tuple(pool.counts)
                one = EncoderSide(0, first.encoder, first.select, first.owner, first.wrappers, sum(counts), counts)
                return [one], [pool]
        pools = [self._of_side(side, [x])[0] for side, x in zip(sides, inputs, strict=True)]
        for side, pool in zip(sides, pools, strict=True):
            side.total = pool.total
        return sides, pools

    def _of_side(self, side: EncoderSide, nests: list[Nest]) -> list[Pool]:
        split = self._split(side.index)
        if split is None:
            return self.sorting.pools(side, nests)
        return [SplitPool(_rows(split(nest), side.index), f"input {side.index}") for nest in nests]

    def _split(self, index: int) -> SplitFn | None:
        return self.split_fn[index] if isinstance(self.split_fn, Sequence) else self.split_fn

    def _is_whole(self, index: int, given: Nest) -> bool:
        """Whether an input is a batch; with a `split_fn` it may be a list."""
        return is_whole(given) or (self._split(index) is not None and isinstance(given, list))

    # --- iterators ----------------------------------------------------------------------------------------------------

    def _read(self, agenda: Agenda, inputs: tuple[Nest, ...]) -> Iterator[Item]:
        """Items of iterators; if rows have lengths, a window of blocks at a time."""
        read = [0] * len(agenda.sides)
        waiting: dict[int, list[Nest]] = {}
        for side, block in self._blocks(agenda.sides, inputs):
            for index in list(waiting):
                if index != side.index and len(inputs) == len(agenda.sides):
                    yield from self._flush(agenda, agenda.sides[index], waiting.pop(index), read)
            window = 1 if self._split(side.index) else self.sorting.window(side, block)
            mine = waiting.setdefault(side.index, [])
            if mine and not self.sorting.can_join(side, [mine[0], block]):
                yield from self._flush(agenda, side, mine, read)
                mine = waiting[side.index] = []
            mine.append(block)
            if len(mine) >= window:
                yield from self._flush(agenda, side, waiting.pop(side.index), read)
        for index, nests in waiting.items():
            yield from self._flush(agenda, agenda.sides[index], nests, read)

    def _flush(self, agenda: Agenda, side: EncoderSide, nests: list[Nest], read: list[int]) -> Iterator[Item]:
        for pool in self._of_side(side, nests):
            yield from self._cut(agenda, side, pool, read[side.index], blocks=True)
            read[side.index] += pool.total

    def _blocks(self, sides: list[EncoderSide], inputs: tuple[Nest, ...]) -> Iterator[tuple[EncoderSide, Nest]]:
        if len(inputs) < len(sides):
            for item in joint_blocks(inputs[0], len(sides)):
                yield from zip(sides, item, strict=True)
            return
        for side, given in zip(sides, inputs, strict=True):
            whole = self._is_whole(side.index, given)
            for block in [given] if whole else blocks(given, f"input {side.index}"):
                yield side, block

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _cut(
        self, agenda: Agenda, side: EncoderSide, pool: Pool, offset: int = 0, *, blocks: bool = False
    ) -> list[Item]:
        """The chunks of a pool. `blocks`: the pool holds blocks of an iterator."""
        if isinstance(pool, SplitPool) and len(pool.lengths) and (self.sorting.rule or self.chunk_tokens):
            plan = by_length(pool.lengths, size=self._size(side, pool), tokens=self.chunk_tokens)
        elif pool.rule is None:
            columns = _columns(pool) if self.chunk_tokens else 0
            fits = max(1, (self.chunk_tokens or 0) // columns) if columns else sys.maxsize
            plan = by_rows(pool.total, min(fits, self._size(side, pool)))
        else:
            size, buckets = self._size(side, pool), self.sorting.buckets(side, pool.rule)
            overhead = self.sorting.overhead(side, pool.rule)
            plan = by_length(pool.lengths, size=size, tokens=self.chunk_tokens, buckets=buckets, overhead=overhead)
            if blocks and any(map(is_collective, side.wrappers)):
                # Blocks may be short where samples were left out; ranks with as many blocks need as many chunks.
                plan = in_pieces(plan, sum(-(-count // size) for count in pool.counts))
        agenda.padding = agenda.padding.plus(pool.padding(plan))
        return [Item(side, pool, piece, offset) for piece in plan]

    def _size(self, side: EncoderSide, pool: Pool) -> int:
        if isinstance(self.chunk_size, int):
            return self.chunk_size
        if isinstance(self.chunk_size, tuple):
            return self.chunk_size[side.index]
        if self.chunk_tokens is not None and (pool.rule is not None or _columns(pool)):
            return sys.maxsize
        if side.index not in self.found:
            trial = Trial(side, pool.longest())
            limit = trial.limit(self.memory_limit)
            self.found[side.index] = largest_chunk(trial.cost, most=pool.total, limit=limit)
        return self.found[side.index]

    def _check_sharded(self, sides: list[EncoderSide], count: int) -> None:
        """Forward passes of FSDP and ZeRO 3 are collective: all ranks need equally many chunks; checked if known."""
        if not any(is_collective(wrapper) for side in sides for wrapper in side.wrappers):
            return
        if self.chunk_size == "auto" and self.chunk_tokens is None:
            remedy = "Pass a number: trial runs would leave gradients in the shards."
            bad_value("chunk_size", expected="a number for encoders under FSDP or ZeRO 3", got="'auto'", remedy=remedy)
        check_equal_counts(count, Team.of(self.group), sides[0].device)


def _columns(pool: Pool) -> int:
    """Tokens of each row of a pool that is not cut; 0 if it has none."""
    if isinstance(pool, SplitPool):
        return len(pool.lengths)
    return token_columns(pool.nests[0])


def owner_of(encoder: Encoder) -> nn.Module:
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


def _rows(found: object, index: int) -> SplitRows:
    """Check what a `split_fn` returned."""
    if not isinstance(found, SplitRows):
        remedy = "It says how many rows there are and how to take some of them."
        bad_type(f"split_fn of input {index}", expected="ct.Rows", got=type(found).__name__, remedy=remedy)
    return found
