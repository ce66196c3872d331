"""Lengths of rows, from a mask or as given, and rows without their padding.

    pool = Pool([{"input_ids": ids, "attention_mask": mask}], ByLength())
    pool.lengths                                    # tokens of each row
    pool.take(torch.tensor([3, 8]), length=12)      # these rows, 12 columns wide

A pool may hold several batches: the columns that one encoder serves, or chunks of an iterator. Its rows have
consecutive numbers, and a chunk may mix rows of several batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from contratile.errors import bad_type, bad_value, check_count
from contratile.grad_cache.chunks import Nest, count_rows, map_tensors, tensors_of
from contratile.grad_cache.plan import Padding, Piece
from contratile.grad_cache.rows import Rows

POWERS = tuple(2**n for n in range(3, 20))
OVERHEAD_CPU, OVERHEAD_ACCELERATOR = 64, 1024
"""Fixed cost of a chunk, in tokens. Measured on one CPU thread: 26 for a transformer of 6 layers and width 384, 60 for
4 layers of width 128; more threads speed up only the tokens. On an accelerator: an estimate for launching the kernels
of a small transformer."""


@dataclass(frozen=True, kw_only=True)
class ByLength:
    """How `GradCache` cuts mappings whose rows differ in length.

    Examples:
        >>> import contratile as ct
        >>> ct.ByLength(cut=("input_ids", "attention_mask", "bbox"), buckets=(32, 64, 128)).window
        16
    """

    mask: str = "attention_mask"
    """Name of the mask [rows, columns], 0 at padding; or of a tensor with the length of each row, if padding is on the
    right."""

    cut: tuple[str, ...] = ()
    """Names of the tensors [rows, columns, ...] that are cut to the length of a chunk. Empty: the mask, all
    integer or boolean tensors [rows, columns] as wide as it, and `inputs_embeds`."""

    buckets: tuple[int, ...] | Literal["auto"] = "auto"
    """Lengths that chunks may have, ascending. Empty: any. "auto": powers of two from 8 if the encoder is compiled by
    `torch.compile`, any otherwise."""

    overhead: int | Literal["auto"] | None = "auto"
    """Fixed cost of a chunk (calls, kernel launches), in tokens. A chunk ends early where that saves more padding than
    another chunk costs: tokens, padding and overhead together are minimal. None: chunks are as large as allowed.
    "auto": 64 on a CPU (measured), 1,024 on an accelerator (estimated), None under `torch.compile`, FSDP and ZeRO 3,
    where a new size of chunk has a cost of its own."""

    window: int = 16
    """Chunks that are read ahead from an iterator, to sort their rows together."""

    check: bool = True
    """In the first step, compare the features of a few rows with and without padding. If they differ, warn and neither
    sort nor cut. Batch norm in training mode also turns sorting off: its statistics would be those of one length."""

    def __post_init__(self) -> None:
        check_count("window", self.window, least=1)
        if self.overhead is not None and self.overhead != "auto":
            check_count("overhead", self.overhead, least=0)
        if isinstance(self.cut, str):
            bad_type("cut", expected="a tuple of names", got="str", remedy=f"Write cut=({self.cut!r},).")
        if self.buckets == "auto":
            return
        if not isinstance(self.buckets, tuple | list):
            remedy = "For example buckets=(32, 64, 128)."
            bad_type("buckets", expected="'auto' or a tuple of lengths", got=self.buckets, remedy=remedy)
        for bucket in self.buckets:
            check_count("buckets", bucket, least=1)
        if list(self.buckets) != sorted(set(self.buckets)):
            bad_value("buckets", expected="ascending lengths", got=self.buckets, remedy="Sort them, each once.")


def has_lengths(nest: Nest, rule: ByLength) -> bool:
    """Whether the rule finds lengths in a nest."""
    if not isinstance(nest, Mapping):
        return False
    mask = nest.get(rule.mask)
    found = isinstance(mask, Tensor) and (mask.dim() == 2 or (mask.dim() == 1 and _is_integer(mask)))
    if not found and mask is not None and rule.mask != ByLength.mask:
        got = f"{list(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        expected = "a mask [rows, columns] or integer lengths [rows]"
        bad_value(f"input {rule.mask!r}", expected=expected, got=got, remedy="ByLength(mask=...) names it.")
    return found


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_named(inputs: Sequence[Nest], rule: ByLength) -> None:
    """Raise unless the mask, if it was named by the user, is in one of the inputs of a step."""
    if rule.mask != ByLength.mask and not any(isinstance(x, Mapping) and rule.mask in x for x in inputs):
        got = " and ".join(", ".join(map(str, x)) if isinstance(x, Mapping) else type(x).__name__ for x in inputs)
        remedy = "ByLength(mask=...) names the mask or the lengths among the inputs."
        bad_value("inputs", expected=f"one with {rule.mask!r}", got=got, remedy=remedy)


def token_columns(nest: Nest) -> int:
    """Columns of the widest integer tensor [rows, columns] of a nest; 0 if it has none."""
    return max((x.shape[1] for x in tensors_of(nest) if x.dim() == 2 and not x.is_floating_point()), default=0)


class Pool:
    """Rows of one or more mappings with lengths; without a rule, of one nest that is not cut."""

    def __init__(self, nests: Sequence[Nest], rule: ByLength | None, name: str = "input") -> None:
        self.nests, self.rule = list(nests), rule
        self.counts = [count_rows(nest, name) for nest in nests]
        if 0 in self.counts:
            remedy = "Skip empty batches, or use drop_last=True in the loader."
            bad_value(name, expected="at least one row", got=0, remedy=remedy)
        self.total = sum(self.counts)
        self.lengths = torch.empty(0, dtype=torch.long)
        self.left = False
        if rule is None:
            return
        self.names = _names_to_cut(nests[0], rule, name)
        self.widths: list[int] = [nest[self.names[0]].shape[1] for nest in nests]
        if 0 in self.widths:
            remedy = "Keep at least one token, for example a special one."
            bad_value(name, expected="tensors with at least one column", got=0, remedy=remedy)
        bounds = [_bounds(nest[rule.mask], width) for nest, width in zip(nests, self.widths, strict=True)]
        ends = all(bool((end == w).all()) for (_, end), w in zip(bounds, self.widths, strict=True))
        self.left = ends and any(bool((start > 0).any()) for start, _ in bounds)
        pairs = zip(bounds, self.widths, strict=True)
        self.lengths = torch.cat([w - start if self.left else end for (start, end), w in pairs]).clamp_min_(1)

    @property
    def width(self) -> int:
        """Columns of the widest nest."""
        return max(self.widths)

    def padding(self, plan: Sequence[Piece]) -> Padding:
        """Tokens before and after sorting."""
        if self.rule is None:
            return Padding()
        given = sum(count * width for count, width in zip(self.counts, self.widths, strict=True))
        return Padding(int(self.lengths.sum()), sum(piece.cost for piece in plan), given)

    def longest(self) -> Nest:
        """All rows, the longest first, for trials. With several nests: the rows of the widest one."""
        if self.rule is None:
            return self.nests[0]
        widest = self.widths.index(self.width)
        one = Pool([self.nests[widest]], self.rule)
        return one.take(one.lengths.argsort(descending=True, stable=True), self.width)

    def chunk(self, piece: Piece) -> Nest:
        """The inputs of a piece of the plan; views where its rows follow each other in one nest."""
        if self.rule is None:
            return _rows(self.nests[0], piece.span or piece.rows)
        return self.take(piece.rows, piece.length, piece.span)

    def take(self, rows: Tensor, length: int, span: slice | None = None) -> Nest:
        """Some rows, cut to a length or padded to it."""
        length = min(length, self.width)
        if len(self.nests) == 1:
            return self._from_one(0, span or rows, length)
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        owner = torch.bucketize(rows, starts[1:], right=True)
        places = [(k, (owner == k).nonzero().flatten()) for k in sorted(set(owner.tolist()))]
        parts = [(k, at, rows[at] - starts[k]) for k, at in places]
        if len(parts) == 1 and length <= self.widths[parts[0][0]]:
            return self._from_one(parts[0][0], parts[0][2], length)
        return {x: self._joined(x, parts, length, len(rows)) for x in self.nests[0]}

    def _from_one(self, k: int, rows: slice | Tensor, length: int) -> Nest:
        columns = self._columns(k, length)
        return {x: _rows(y[:, columns] if x in self.names else y, rows) for x, y in self.nests[k].items()}

    def _columns(self, k: int, length: int) -> slice:
        """Columns of a nest that are kept."""
        width = self.widths[k]
        return slice(width - min(width, length), width) if self.left else slice(0, min(width, length))

    def _joined(self, name: str, parts: list[tuple[int, Tensor, Tensor]], length: int, count: int) -> Any:
        """A tensor of a chunk whose rows come from several nests."""
        first = self.nests[0][name]
        if not isinstance(first, Tensor) or first.dim() == 0:
            return first
        if name not in self.names:
            out = first.new_empty((count, *first.shape[1:]))
            for k, at, mine in parts:
                out[at.to(out.device)] = self.nests[k][name].index_select(0, mine.to(out.device))
            return out
        out = first.new_full((count, length, *first.shape[2:]), self._filler(name))
        for k, at, mine in parts:
            columns = self._columns(k, length)
            kept = columns.stop - columns.start
            place = slice(length - kept, length) if self.left else slice(0, kept)
            out[at.to(out.device), place] = self.nests[k][name][:, columns].index_select(0, mine.to(out.device))
        return out

    def _filler(self, name: str) -> Any:
        """The value at padded places of a tensor: copied from its padding, 0 if it has none and in masks."""
        assert self.rule is not None
        for nest in self.nests:
            mask = nest[self.rule.mask]
            if mask.dim() != 2 or name == self.rule.mask or nest[name].dim() != 2:
                continue
            empty = (mask == 0).nonzero()
            if len(empty):
                return nest[name][tuple(empty[0])].item()
        return 0


def can_join(nests: Sequence[Nest], rule: ByLength) -> bool:
    """Whether rows of several mappings can be in one chunk: same names, shapes of a row, dtypes and other values."""
    first, *rest = nests
    names = [set(_names_to_cut(nest, rule, "input")) for nest in nests]
    for nest, cut in zip(rest, names[1:], strict=True):
        if nest.keys() != first.keys() or cut != names[0]:
            return False
        if not all(_alike(value, nest[name], 2 if name in cut else 1) for name, value in first.items()):
            return False
    pools = [Pool([nest], rule) for nest in nests]
    sides = {pool.left for pool in pools if bool((pool.lengths < pool.width).any())}
    return len(sides) < 2


def _alike(a: Any, b: Any, dim: int) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and b.dim():
        return a.shape[dim:] == b.shape[dim:] and a.dtype == b.dtype and a.device == b.device
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and bool(torch.equal(a, b))
    return a is b or (not isinstance(a, Mapping | tuple | list) and bool(a == b))


def _names_to_cut(nest: Nest, rule: ByLength, name: str) -> tuple[str, ...]:
    """Names of the tensors that are cut, the mask among them."""
    mask = nest[rule.mask]
    if rule.cut:
        names = (*rule.cut, *((rule.mask,) if mask.dim() == 2 and rule.mask not in rule.cut else ()))
        for x in names:
            _check_cut(nest, x, mask, name)
        return names
    flat = {x: y for x, y in nest.items() if isinstance(y, Tensor) and y.dim() == 2 and not y.is_floating_point()}
    if mask.dim() == 2:
        width, embedded = mask.shape[1], nest.get("inputs_embeds")
        found = {x for x, y in flat.items() if y.shape[1] == width} | {rule.mask}
        if isinstance(embedded, Tensor) and embedded.dim() == 3 and embedded.shape[1] == width:
            found.add("inputs_embeds")
        return tuple(x for x in nest if x in found)
    if len({y.shape[1] for y in flat.values()}) != 1:
        got = ", ".join(f"{x} {list(y.shape)}" for x, y in flat.items()) or "none"
        remedy = "Name the tensors to cut: lengths=ByLength(mask=..., cut=(...))."
        bad_value(name, expected="integer tensors [rows, columns] of one width", got=got, remedy=remedy)
    return tuple(flat)


def _check_cut(nest: Nest, wanted: str, mask: Tensor, name: str) -> None:
    x = nest.get(wanted)
    width = mask.shape[1] if mask.dim() == 2 else None
    if not isinstance(x, Tensor) or x.dim() < 2 or (width is not None and x.shape[1] != width):
        expected = f"a tensor {wanted!r} [rows, {width or 'columns'}, ...]"
        got = list(x.shape) if isinstance(x, Tensor) else "none"
        bad_value(f"cut of {name}", expected=expected, got=got, remedy=f"There are {', '.join(map(str, nest))}.")


def _bounds(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For each row: the first column that is not padding, and the column after the last; (0, 0) for empty rows."""
    if mask.dim() == 1:
        ends = mask.long().cpu().clamp_max(width)
        if bool((ends < 0).any()):
            remedy = "They are the tokens of each row, without padding."
            bad_value("lengths", expected="numbers of at least 0", got=int(ends.min()), remedy=remedy)
        return torch.zeros_like(ends), ends
    there = mask != 0
    columns = torch.arange(1, width + 1, device=mask.device)
    ends = (there * columns).amax(1)
    starts = torch.where(ends > 0, width - (there * columns.flip(0)).amax(1), 0)
    both = torch.stack([starts, ends]).cpu()
    return both[0], both[1]


def _rows(nest: Nest, rows: slice | Tensor) -> Nest:
    """Rows of all tensors of a nest; values without rows as they are."""

    def taken(x: Tensor) -> Tensor:
        if x.dim() == 0:
            return x
        return x[rows] if isinstance(rows, slice) else x.index_select(0, rows.to(x.device))

    return map_tensors(taken, nest)


class SplitPool(Pool):
    """Rows that a `split_fn` takes."""

    def __init__(self, rows: Rows, name: str) -> None:
        if rows.count < 1:
            bad_value(name, expected="at least one row", got=rows.count, remedy="Skip empty batches.")
        self.rows, self.rule, self.nests = rows, None, []
        self.total, self.counts = rows.count, [rows.count]
        self.lengths = torch.empty(0, dtype=torch.long) if rows.lengths is None else rows.lengths.long().cpu()

    def longest(self) -> Nest:
        remedy = "Pass a number of rows, or chunk_tokens= if the rows have lengths."
        bad_value("chunk_size", expected="a number with split_fn", got="'auto'", remedy=remedy)

    def chunk(self, piece: Piece) -> Nest:
        return self.rows.take(piece.rows)
