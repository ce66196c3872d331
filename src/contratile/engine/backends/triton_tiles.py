"""The tile engine in Triton kernels: host code of `triton_forward.py` and `triton_gradient.py`.

    forward     a tile of scores is reduced to its row and column statistics                         1 product
    backward    a chunk of g is written, then dq += g k and dk += g^T q are library products          3 products

A launch is data before it runs, so tests compile ahead of time exactly what runs here. Nothing is read back from the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from contratile.engine.backends import triton_configs, triton_forward, triton_gradient
from contratile.engine.backends.block import Given, Gradients, Scores, SideGrad
from contratile.engine.backends.precision import library_products
from contratile.engine.backends.torch_reductions import LseSide, LseWeights
from contratile.engine.backends.torch_softplus import SoftplusWeights
from contratile.engine.backends.torch_tiles import score_positives_
from contratile.engine.backends.triton_configs import careful_config, cut_backward, cut_forward
from contratile.engine.backends.triton_launch import INTERPRETED, SMALL, Device, KernelCall, Launch, on_device
from contratile.engine.backends.triton_positives import add_positives
from contratile.engine.plan import plan_tiles
from contratile.engine.rule import PairRule
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts, Stats, lowest

__all__ = ["INTERPRETED", "backward", "forward", "interprets_bf16", "positives"]

GROUP = 8
"""Row blocks that share the columns in the L2 cache."""

MERGE_BLOCK, MERGE_PARTS = 128, 16
ADDED = ("higher", "equal", "sums", "counts")
"""Statistics that are plain sums."""


# --- forward ------------------------------------------------------------------------------------------------------


def positives(scores: Scores, spec: Spec, level: Tensor) -> None:
    """Write each row's product with its positive, from the tiles that hold one, computed as `forward` computes them."""
    if len(scores.q) and len(scores.key):
        with on_device(scores.q.device):
            positive_launch(KernelCall(scores, spec, Device.of(scores.q.device)), level).run()


def positive_launch(call: KernelCall, level: Tensor) -> Launch:
    config, names = call.forward, triton_forward.positive_products.arg_names
    arguments = call.features(config) | {"alpha": call.alpha, "labels": call.labels, "level": level}
    arguments = {name: arguments[name] for name in names}
    if call.device.arch == 120:  # with a longer pipeline short TF32 features spill there
        config = config._replace(stages=2)
    return Launch(triton_forward.positive_products, (-(-len(call.scores.q) // config.m),), arguments, config.options())


def forward(scores: Scores, spec: Spec, pos: Tensor | None) -> tuple[SideParts, SideParts]:
    """Statistics of the block's rows and columns; each row's positive score is written to `pos`."""
    q, key = scores.q, scores.key
    row = _empty(len(q), q.device, spec, sums=spec.sums != "") if spec.rows or spec.reduce != "lse" else SideParts()
    col = _empty(len(key), q.device, spec, sums=spec.sums_cols) if spec.cols else SideParts()
    if not len(q) or not len(key):
        return row, col
    level = scores.row_level
    if pos is not None:
        level = torch.empty_like(pos)
        positives(scores, spec, level)
        score_positives_(scores, pos.copy_(level))
    with on_device(q.device):
        call = KernelCall(scores, spec, Device.of(q.device))
        for launch in forward_launches(call, row, col):
            launch.run()
    if scores.rule.labels is not None and level is not None:
        add_positives(row, col, scores, spec, level)
    return row, col


def _empty(n: int, device: torch.device, spec: Spec, *, sums: bool) -> SideParts:
    """Statistics of nothing."""
    stats = Stats.empty(n, dtype=torch.float32, device=device)

    def zeros(wanted: bool) -> Tensor | None:
        return torch.zeros_like(stats.total) if wanted else None

    return SideParts(
        level=stats.level if spec.reduce == "lse" else None,
        total=stats.total,
        higher=zeros(spec.ranks),
        equal=zeros(spec.ranks and spec.ties),
        sums=zeros(sums),
        counts=zeros(sums),
    )


def forward_launches(call: KernelCall, row: SideParts, col: SideParts) -> Iterator[Launch]:
    """For each chunk of column blocks: the tiles, fast and careful, and the merge of their partial results."""
    scores, config = call.scores, call.forward
    n, m, symmetric = len(scores.q), len(scores.key), scores.k is None
    if symmetric:  # the columns are rows
        col = row
    fields = sum(x is not None for x in row)
    blocks, span, splits = cut_forward(
        *(n, m, config), processors=call.device.processors, fields=fields, workspace=triton_configs.WORKSPACE_BYTES
    )
    part_cols = min(m, blocks * config.n)
    row_parts, col_parts = _scratch(row, blocks, n), _scratch(col, 2 * splits, part_cols)
    new = scores.q.new_empty
    shared = call.statistics(config, row_parts, col_parts) | {
        "special": new(blocks, -(-n // config.m), dtype=torch.int8),
        "marks": new(blocks * splits, dtype=torch.int32),
        **{"N": n, "M": m, "span": span, "part_cols": part_cols},
    }
    yield from call.bounds(config, shared)
    fast, careful = call.fast(shared), list(call.careful(shared))
    options, careful_options = config.options(), careful_config(call.device.arch, config, forward=True).options()
    for first in range(0, -(-m // config.n), blocks):
        count = min(blocks, -(-m // config.n) - first)
        chosen = [(fast, options), *((arguments, careful_options) for arguments in careful)]
        for arguments, how in chosen:
            yield Launch(triton_forward.forward_tiles, (count, splits), arguments | {"first": first}, how)
        if symmetric or row.total is not None:
            yield from _merges(row, row_parts, count, first=first, triangle=config.n if symmetric else 0)
        cols = slice(first * config.n, min(m, (first + count) * config.n))
        yield from _merges(SideParts(*(None if x is None else x[cols] for x in col)), col_parts, 2 * splits)


def _scratch(side: SideParts, parts: int, length: int) -> SideParts:
    """Room for the partial results of one side."""
    return SideParts(*(None if x is None else x.new_empty(parts, length) for x in side))


def _merges(into: SideParts, parts: SideParts, count: int, *, first: int = 0, triangle: int = 0) -> Iterator[Launch]:
    """One launch for the log-sum-exps, and one for each plain sum."""
    sums = [(name, getattr(into, name), getattr(parts, name)) for name in ("total", *ADDED)]
    for name, total, part in sums:
        if total is None:
            continue
        levels = name == "total" and into.level is not None
        arguments = {
            "level": into.level if levels else None,
            "total": total,
            "part_level": parts.level if levels else None,
            "part_total": part,
            **{"parts": count, "count": len(total), "stride": part.stride(0), "first": first},
            **{"TRIANGLE": triangle, "BLOCK_P": MERGE_PARTS, "BLOCK": MERGE_BLOCK},
        }
        yield Launch(triton_forward.merge_parts, (-(-len(total) // MERGE_BLOCK),), arguments, SMALL)


# --- backward -----------------------------------------------------------------------------------------------------


def backward(scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
    """Add this block's share to the gradients.

        dq += alpha g k,   dk += alpha g^T q,   dalpha += sum(g <q, k>),   dbias += sum(g)

    Chunks of g are written in the features' dtype. Upstream gradients are scaled to about 1 first, because 1 / N would
    underflow in fp16; the scaling is undone at the end, together with alpha, in fp32. Where other calls have added to
    the same tensors, which are fp32 as the features are, each chunk is multiplied instead.
    """
    q, (dq, dk, dalpha, dbias, _, dcol_bias, *_) = scores.q, into
    if not len(q) or not len(scores.key) or not _upstream(given):
        return
    with on_device(q.device):
        given, peak = _near_one(given, fp16=q.dtype == torch.float16)
        call = KernelCall(scores, spec, Device.of(q.device))
        factor = call.alpha * peak
        write = any(x is not None for x in (dq, dk, dcol_bias))
        add_up = dalpha is not None or dbias is not None
        chunks = Chunks(call, given, write=write, add_up=add_up)
        if scores.k is None:
            _products_of_one_set(chunks, q, into, factor)
        else:
            _products_of_two_sets(chunks, q, scores.k, into, factor)
        if dcol_bias is not None:
            dcol_bias.mul_(peak)
        for total, more in zip((dalpha, dbias), chunks.sums, strict=True):
            if total is not None:
                total += (more * peak).to(total.device)


def _products_of_two_sets(chunks: Chunks, q: Tensor, k: Tensor, into: Gradients, factor: Tensor) -> None:
    dq, dk = into.dq, into.dk
    room = None if dq is None else q.new_empty(chunks.cut.rows, q.shape[1], dtype=torch.float32)
    for rows in chunks.row_slices():
        dq_RD = None if room is None else room[: rows.stop - rows.start]
        for number_, cols in enumerate(chunks.col_slices(rows)):
            g_RC = chunks.compute(rows, cols)
            if dq_RD is not None:
                add_product_(dq_RD, g_RC, k[cols], first=number_ == 0)
            if into.dcol_bias is not None:
                into.dcol_bias[cols] += g_RC.sum(0, dtype=torch.float32)
            if dk is not None:
                if into.shared:
                    g_RC.mul_(factor)
                add_product_(dk[cols], g_RC.t(), q[rows])
        if dq is not None and dq_RD is not None:
            if into.once:
                torch.mul(dq_RD, factor, out=dq[rows])
            else:
                dq[rows].addcmul_(dq_RD, factor)
    if dk is not None and not into.shared:
        dk.mul_(factor)


def _products_of_one_set(chunks: Chunks, q: Tensor, into: Gradients, factor: Tensor) -> None:
    """Chunks on and above the diagonal; those above it also count as their transposes."""
    dq = into.dq
    for rows in chunks.row_slices():
        for cols in chunks.col_slices(rows):
            g_RC = chunks.compute(rows, cols)
            if dq is not None:
                if into.shared:
                    g_RC.mul_(factor)
                add_product_(dq[rows], g_RC, q[cols])
                if rows != cols:
                    add_product_(dq[cols], g_RC.t(), q[rows])
    if dq is not None and not into.shared:
        dq.mul_(factor)


class Chunks:
    """The chunks of g and the sums over them."""

    def __init__(self, call: KernelCall, given: Given, *, write: bool, add_up: bool) -> None:
        scores, config = call.scores, call.gradient
        q, symmetric = scores.q, scores.k is None
        self.n, self.m, self.symmetric, self.config = len(q), len(scores.key), symmetric, config
        self.careful = careful_config(call.device.arch, config)
        self.careful_arguments = call.careful_gradients(self.careful)
        self.cut = cut_backward(
            *(self.n, self.m, config),
            itemsize=q.dtype.itemsize,
            symmetric=symmetric,
            workspace=triton_configs.WORKSPACE_BYTES,
        )
        rows, cols = self.cut
        high, wide = -(-rows // config.m), -(-cols // config.n)
        # In whole tiles: kernels write 16 bytes at a time, also at the end of a chunk.
        self.grad = q.new_empty(high * config.m, wide * config.n) if write else None
        programs = -(-high // GROUP) * GROUP * wide
        more = high * (config.m // self.careful.m) * wide
        self.parts = q.new_empty(programs + more, 2, dtype=torch.float32) if add_up else None
        weight = _positive_weights(scores, spec=call.spec, given=given)
        self.arguments = call.gradients(config, given) | {
            "pos_weight": weight,
            "grad": self.grad,
            "grad_row": 0 if self.grad is None else self.grad.stride(0),
            "sums": self.parts,
            "special": q.new_empty(programs, dtype=torch.int32),
            **{"M": self.m, "first_sum": programs},
        }
        for launch in self.preparations(call, given):
            launch.run()
        self.sums = q.new_zeros(2, dtype=torch.float32)
        if add_up and weight is not None:
            self._add_positives(call, weight, given)

    def preparations(self, call: KernelCall, given: Given) -> Iterator[Launch]:
        """Bounds of labels and, if both sides share an exponential, their weights."""
        yield from call.bounds(self.config, self.arguments)
        if self.arguments["row_far"] is None:
            return
        for name, block in (("row", self.config.m), ("col", self.config.n)):
            arguments = {x: self.arguments[f"{name}_{x}"] for x in ("lse", "grad", "weight", "far")}
            arguments |= {"shift": self.arguments["shift"], "N": len(arguments["lse"]), "BLOCK": block}
            grid = (-(-len(arguments["lse"]) // block),)
            yield Launch(triton_gradient.side_weights, grid, arguments, SMALL)

    def _add_positives(self, call: KernelCall, weight: Tensor, given: Given) -> None:
        """The positives' share of the sums: kernels add up negatives."""
        labels, pos = call.scores.rule.labels, given.pos
        assert labels is not None and pos is not None
        if self.symmetric:  # two rows that are each other's positive hold the same pair
            weight = weight * torch.where(labels[labels] == torch.arange(self.n, device=labels.device), 0.5, 1.0)
        dots = pos / call.alpha
        if call.bias is not None or call.scores.col_bias is not None:
            # The product cannot be recovered from a score that a bias has rounded.
            positive_launch(call, dots).run()
            dots = dots * torch.where(call.alpha < 0, -1.0, 1.0)
        self.sums += torch.stack([(weight * dots).sum(), weight.sum()])

    def row_slices(self) -> Iterator[slice]:
        return _slices(0, self.n, self.cut.rows)

    def col_slices(self, rows: slice) -> Iterator[slice]:
        return _slices(rows.start if self.symmetric else 0, self.m, self.cut.cols)

    def launches(self, rows: slice, cols: slice) -> Iterator[Launch]:
        config = self.config
        high, wide = -(-(rows.stop - rows.start) // config.m), -(-(cols.stop - cols.start) // config.n)
        depth = min(GROUP, high)
        chunk = {"first_row": rows.start, "rows_end": rows.stop, "first_col": cols.start, "cols_end": cols.stop}
        fast = self.arguments | chunk | {"depth": depth}
        low = high * (config.m // self.careful.m)
        kernel = triton_gradient.gradient_tiles
        yield Launch(kernel, (depth, wide, -(-high // depth)), fast, config.options())
        yield Launch(kernel, (low, wide), fast | self.careful_arguments, self.careful.options())

    def compute(self, rows: slice, cols: slice) -> Tensor:
        """g of the chunk. For symmetric scores it covers both sides of a pair; diagonal chunks hold each twice."""
        if self.parts is not None:
            self.parts.zero_()
        for launch in self.launches(rows, cols):
            launch.run()
        if self.parts is not None:
            self.sums += self.parts.sum(0) * (0.5 if self.symmetric and rows == cols else 1.0)
        return self.sums[:0] if self.grad is None else self.grad[: rows.stop - rows.start, : cols.stop - cols.start]


def _positive_weights(scores: Scores, *, spec: Spec, given: Given) -> Tensor | None:
    """g at each row's positive, in full precision."""
    rule, pos = scores.rule, given.pos
    if rule.labels is None or pos is None:
        return None
    own: dict[str, Any] = {"rule": rule, "pos": pos, "pos_grad": given.pos_grad}
    if spec.reduce == "softplus":
        row = torch.zeros_like(pos) if given.row is None else given.row.grad
        weights: LseWeights | SoftplusWeights = SoftplusWeights(
            row, None if given.col is None else given.col.grad, **own
        )
    else:
        sides = (None if x is None or x.lse is None else LseSide(x.lse, x.grad) for x in (given.row, given.col))
        weights = LseWeights(*sides, **own, mirrored=scores.k is None)
    return weights.positive(slice(0, len(pos)), both=True).contiguous()


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _upstream(given: Given) -> list[Tensor]:
    sides = [side.grad for side in (given.row, given.col) if side is not None]
    return sides + [x for x in (given.pos_grad, given.row_sums, given.col_sums) if x is not None]


def _near_one(given: Given, *, fp16: bool) -> tuple[Given, Tensor]:
    """Divide the upstream gradients by a power of two close to their maximum; return both.

    In fp16 they are kept 12 bits larger, within its range, so that the small weights of large batches stay normal.
    """
    largest = torch.stack([grad.abs().amax() for grad in _upstream(given)]).amax()
    exponent = (largest.frexp().exponent - (13 if fp16 else 1)).clamp(min=-126)  # a power of two that is not 0
    peak = torch.ldexp(torch.ones_like(largest), exponent)
    row, col = (None if side is None else _scaled(side, peak) for side in (given.row, given.col))
    pos_grad, row_sums, col_sums = (
        None if x is None else (x / peak).contiguous() for x in (given.pos_grad, given.row_sums, given.col_sums)
    )
    return Given(row, col, given.pos, pos_grad, row_sums, col_sums), peak


def _scaled(side: SideGrad, peak: Tensor) -> SideGrad:
    lse = None if side.lse is None else side.lse.clamp(min=lowest(torch.float32)).contiguous()
    return SideGrad(lse, (side.grad / peak).contiguous(), side.level)


def add_product_(into: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """into += a b, or into = a b for the first of many; 16-bit factors are summed in fp32."""
    beta = 0 if first else 1
    if a.dtype == into.dtype:
        into.addmm_(a, b, beta=beta)
    elif adds_in_fp32(into.device, a.dtype):
        torch.addmm(into, a, b, out_dtype=torch.float32, beta=beta, out=into)
    else:
        with library_products("tf32", into):  # TF32 holds every 16-bit number
            into.addmm_(a.to(into.dtype), b.to(into.dtype), beta=beta)


@cache
def adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch can add a 16-bit product to an fp32 matrix in place here; tried once on a small example."""
    ones, total = (torch.ones(16, 16, dtype=x, device=device) for x in (dtype, torch.float32))
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, beta=1, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


@cache
def interprets_bf16() -> bool:
    """Whether the interpreter supports bfloat16: Triton's own multiplies the bits as integers."""
    ones = torch.ones(1, 16, dtype=torch.bfloat16)
    scores = Scores(ones, ones, torch.ones(()), None, PairRule(), plan_tiles(1, 1, 16), None, None, ones[:0])
    row, _ = forward(scores, Spec(cols=False, tile=16), None)
    assert row.level is not None and row.total is not None
    return row.level.tolist() == [16.0] and row.total.tolist() == [1.0]
