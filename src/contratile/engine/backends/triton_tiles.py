"""The tile engine in Triton kernels: host code of `triton_kernels.py`.

    forward     a tile of scores is reduced to its row and column statistics                         1 product
    backward    a chunk of g is written, then dq += g k and dk += g^T q are library products          3 products

A launch is data before it runs, so tests compile ahead of time exactly what runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from contratile.engine import tuned
from contratile.engine.backends import triton_configs, triton_kernels
from contratile.engine.backends.block import Given, Gradients, KernelError, Scores, SideGrad
from contratile.engine.backends.precision import library_products
from contratile.engine.backends.triton_configs import Arch, Config, config_for, cut_backward, cut_forward, kind_of
from contratile.engine.plan import plan_tiles
from contratile.engine.rule import PairRule
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts, Stats

GROUP = 8
"""Row blocks that share the columns in the L2 cache."""

MERGE_BLOCK, MERGE_PARTS = 128, 16

INTERPRETED = not hasattr(triton_kernels.forward_tiles, "cache_key")
"""TRITON_INTERPRET=1 was set before Triton was imported: kernels run on CPU tensors."""


class Launch(NamedTuple):
    """A kernel with its grid, arguments and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        try:
            self.kernel[self.grid](**self.arguments, **self.options)
        except (TritonError, RuntimeError, OSError, ImportError, CalledProcessError) as error:
            # The first launch builds the kernel; errors on the device itself are not build errors.
            if INTERPRETED or isinstance(error, torch.OutOfMemoryError) or str(error).startswith("Triton Error"):
                raise
            first_line = next(iter(str(error).splitlines()), "")
            what = f"the kernel {self.kernel.__name__} could not be built ({type(error).__name__}: {first_line})"
            raise KernelError(what) from error


class Device(NamedTuple):
    """The GPU that launches are made for."""

    arch: Arch
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type == "cpu":  # interpreted
            return cls(80, 1)
        properties = torch.cuda.get_device_properties(device)
        return cls(_arch(device), properties.multi_processor_count)


@cache
def _arch(device: torch.device) -> Arch:
    arch = arch_of(device)
    assert arch is not None, "the registry lets only known devices through"
    return arch


def arch_of(device: torch.device) -> Arch | None:
    """The entry of the launch table for a CUDA or ROCm device, if it has one."""
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        return name if name in triton_configs.TABLE else None
    return triton_configs.known_arch(torch.cuda.get_device_capability(device))


class KernelCall(NamedTuple):
    """The arguments that all kernels of a block share."""

    scores: Scores
    spec: Spec
    device: Device
    kernel: str = "forward"
    """Or "gradient"."""

    @property
    def kind(self) -> str:
        return kind_of(self.device.arch, self.scores.q.dtype, self.spec.precision)

    @property
    def config(self) -> Config:
        softplus = self.spec.reduce == "softplus"
        crowded = self.scores.k is None or self.scores.rule.query_ids is not None or softplus
        d, arch = self.scores.q.shape[1], self.device.arch
        return config_for(arch, d, self.kind, self.spec.tile, crowded=crowded, chosen=self.chosen)

    @property
    def chosen(self) -> Config | None:
        """The fastest configuration on this device, if it was tuned and is still a candidate."""
        name, d = device_name(self.scores.q.device), self.scores.q.shape[1]
        found = tuned.kernel(self.kernel, device=name, kind=self.kind, d=d)
        known = triton_configs.candidates(self.device.arch, self.kind, self.kernel) if found else []
        return next((config for config in known if config == found), None)

    def arguments(self) -> dict[str, Any]:
        q, key, rule, config = self.scores.q, self.scores.key, self.scores.rule, self.config
        return {
            "query": q,
            "key": key,
            "alpha": _number(self.scores.alpha, q.device),
            "bias": None if self.scores.bias is None else _number(self.scores.bias, q.device),
            "labels": _dense(rule.labels),
            "query_ids": _dense(rule.query_ids),
            "key_ids": _dense(rule.key_ids),
            "D": q.shape[1],
            "q_row": q.stride(0),
            "q_col": q.stride(1),
            "k_row": key.stride(0),
            "k_col": key.stride(1),
            "SOFTPLUS": self.spec.reduce == "softplus",
            "SELF": rule.exclude_self,
            "SYMMETRIC": self.scores.k is None,
            "PRECISION": "ieee" if self.kind == "16-bit" else self.kind,
            "EVEN_D": q.shape[1] % config.d == 0,
            "BLOCK_M": config.m,
            "BLOCK_N": config.n,
            "BLOCK_D": config.d,
        }

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> Launch:
        config = self.config
        return Launch(kernel, grid, arguments, _options(config.warps, config.stages))


@cache
def device_name(device: torch.device) -> str:
    """What tuned configurations are recorded under."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _options(warps: int, stages: int) -> dict[str, Any]:
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def _number(x: Tensor, device: torch.device) -> Tensor:
    """A 0-d tensor on the device. A number from the CPU is passed by value: copying would synchronise."""
    return torch.scalar_tensor(x.item(), device=device) if x.is_cpu else x.to(device, torch.float32)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


# --- forward ------------------------------------------------------------------------------------------------------


def forward(scores: Scores, spec: Spec, pos: Tensor | None) -> tuple[SideParts, SideParts]:
    """Statistics of the block's rows and columns; each row's positive score is written to `pos`."""
    assert not spec.compares, "kernels do not compare with positives"
    q, key = scores.q, scores.key
    lse = spec.reduce == "lse"
    row = _empty(len(q), q.device, lse=lse) if spec.rows or not lse else SideParts()
    col = _empty(len(key), q.device, lse=lse) if spec.cols else SideParts()
    if len(q) and len(key):
        with _on(q.device):
            for launch in forward_launches(KernelCall(scores, spec, Device.of(q.device)), row, col, pos):
                launch.run()
    return row, col


def _empty(n: int, device: torch.device, *, lse: bool) -> SideParts:
    stats = Stats.empty(n, dtype=torch.float32, device=device)
    return SideParts(*stats) if lse else SideParts(total=stats.total)


def forward_launches(call: KernelCall, row: SideParts, col: SideParts, pos: Tensor | None) -> Iterator[Launch]:
    """For each chunk of row blocks: the tiles, and the merge of their partial results into the statistics."""
    scores, config = call.scores, call.config
    n, m = len(scores.q), len(scores.key)
    symmetric = scores.k is None
    into = row if symmetric else col  # the columns of symmetric scores are rows
    blocks, span, splits = cut_forward(
        n,
        m,
        config,
        processors=call.device.processors,
        cols=into.total is not None or symmetric,
        workspace=triton_configs.WORKSPACE_BYTES,
    )
    part_rows = min(n, blocks * config.m)
    row_parts = _scratch(row, splits, part_rows)
    col_parts = _scratch(into, blocks, m)
    shared = call.arguments() | {
        "row_level": row_parts.level,
        "row_total": row_parts.total,
        "col_level": col_parts.level,
        "col_total": col_parts.total,
        "pos": pos,
        "N": n,
        "M": m,
        "span": span,
        "part_rows": part_rows,
    }
    if pos is None:
        shared["labels"] = None
    for first in range(0, -(-n // config.m), blocks):
        count = min(blocks, -(-n // config.m) - first)
        yield call.launch(triton_kernels.forward_tiles, (count, splits), shared | {"first": first})
        rows = slice(first * config.m, min(n, (first + count) * config.m))
        if row.total is not None:
            chunk = SideParts(None if row.level is None else row.level[rows], row.total[rows])
            yield _merge(chunk, row_parts, splits)
        if into.total is not None:
            yield _merge(into, col_parts, count, first=first, triangle=config.m if symmetric else 0)


def _scratch(side: SideParts, parts: int, length: int) -> SideParts:
    """Room for the partial results of one side."""
    make = (None if x is None else x.new_empty(parts, length) for x in (side.level, side.total))
    return SideParts(*make)


def _merge(into: SideParts, parts: SideParts, count: int, *, first: int = 0, triangle: int = 0) -> Launch:
    assert into.total is not None and parts.total is not None
    arguments = {
        "level": into.level,
        "total": into.total,
        "part_level": parts.level,
        "part_total": parts.total,
        "parts": count,
        "count": len(into.total),
        "stride": parts.total.stride(0),
        "first": first,
        "TRIANGLE": triangle,
        "BLOCK_P": MERGE_PARTS,
        "BLOCK": MERGE_BLOCK,
    }
    return Launch(triton_kernels.merge_parts, (-(-len(into.total) // MERGE_BLOCK),), arguments, _options(4, 2))


# --- backward -----------------------------------------------------------------------------------------------------


def backward(scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
    """Add this block's share to the gradients.

        dq += alpha g k,   dk += alpha g^T q,   dalpha += sum(g <q, k>),   dbias += sum(g)

    Chunks of g are written in the features' dtype. Upstream gradients are scaled to about 1 first, because 1 / N would
    underflow in fp16; the scaling is undone at the end, together with alpha, in fp32.
    """
    q, (dq, dk, dalpha, dbias, _) = scores.q, into
    if not len(q) or not len(scores.key) or not _upstream(given):
        return
    with _on(q.device):
        given, peak = _near_one(given, fp16=q.dtype == torch.float16)
        alpha = _number(scores.alpha, q.device)
        factor = alpha * peak
        call = KernelCall(scores, spec, Device.of(q.device), "gradient")
        write, add_up = dq is not None or dk is not None, dalpha is not None or dbias is not None
        chunks = Chunks(call, given, write=write, add_up=add_up)
        if scores.k is None:
            _products_of_one_set(chunks, q, dq, factor)
        else:
            _products_of_two_sets(chunks, q, scores.k, into, factor)
        weighed, plain = chunks.sums * peak
        if scores.bias is None:
            weighed = weighed / alpha
        for total, more in ((dalpha, weighed), (dbias, plain)):
            if total is not None:
                total += more.to(total.device)


def _products_of_two_sets(chunks: Chunks, q: Tensor, k: Tensor, into: Gradients, factor: Tensor) -> None:
    dq, dk = into.dq, into.dk
    room = None if dq is None else q.new_empty(chunks.cut.rows, q.shape[1], dtype=torch.float32)
    for rows in chunks.row_slices():
        dq_RD = None if room is None else room[: rows.stop - rows.start]
        for number, cols in enumerate(chunks.col_slices(rows)):
            g_RC = chunks.compute(rows, cols)
            if dq_RD is not None:
                add_product_(dq_RD, g_RC, k[cols], first=number == 0)
            if dk is not None:
                add_product_(dk[cols], g_RC.t(), q[rows])
        if dq is not None and dq_RD is not None:
            if into.once:
                torch.mul(dq_RD, factor, out=dq[rows])
            else:
                dq[rows].addcmul_(dq_RD, factor)
    if dk is not None:
        dk.mul_(factor)


def _products_of_one_set(chunks: Chunks, q: Tensor, dq: Tensor | None, factor: Tensor) -> None:
    """Chunks on and above the diagonal; those above it also count as their transposes."""
    for rows in chunks.row_slices():
        for cols in chunks.col_slices(rows):
            g_RC = chunks.compute(rows, cols)
            if dq is not None:
                add_product_(dq[rows], g_RC, q[cols])
                if rows != cols:
                    add_product_(dq[cols], g_RC.t(), q[rows])
    if dq is not None:
        dq.mul_(factor)


class Chunks:
    """The chunks of g and the sums over them."""

    def __init__(self, call: KernelCall, given: Given, *, write: bool, add_up: bool) -> None:
        scores, config = call.scores, call.config
        q, symmetric = scores.q, scores.k is None
        self.n, self.m, self.symmetric = len(q), len(scores.key), symmetric
        self.call, self.given = call, given
        self.cut = cut_backward(
            self.n,
            self.m,
            config,
            itemsize=q.dtype.itemsize,
            symmetric=symmetric,
            workspace=triton_configs.WORKSPACE_BYTES,
        )
        rows, cols = self.cut
        high, wide = -(-rows // config.m), -(-cols // config.n)
        # In whole tiles: kernels write 16 bytes at a time, also at the end of a chunk.
        self.grad = q.new_empty(high * config.m, wide * config.n) if write else None
        self.parts = q.new_empty(high * wide, 2, dtype=torch.float32) if add_up else None
        self.sums = q.new_zeros(2, dtype=torch.float32)
        col = given.row if symmetric else given.col
        self.arguments = call.arguments() | _side("row", given.row) | _side("col", col)
        self.arguments |= {"pos": given.pos, "pos_grad": given.pos_grad, "GROUP": GROUP}
        if given.pos is None:
            self.arguments["labels"] = None

    def row_slices(self) -> Iterator[slice]:
        return _slices(0, self.n, self.cut.rows)

    def col_slices(self, rows: slice) -> Iterator[slice]:
        return _slices(rows.start if self.symmetric else 0, self.m, self.cut.cols)

    def launch(self, rows: slice, cols: slice) -> Launch:
        config = self.call.config
        programs = -(-(rows.stop - rows.start) // config.m) * -(-(cols.stop - cols.start) // config.n)
        chunk = {"first_row": rows.start, "rows_end": rows.stop, "first_col": cols.start, "cols_end": cols.stop}
        stride = 0 if self.grad is None else self.grad.stride(0)
        arguments = self.arguments | chunk | {"grad": self.grad, "grad_row": stride, "sums": self.parts}
        return self.call.launch(triton_kernels.gradient_tiles, (programs,), arguments)

    def compute(self, rows: slice, cols: slice) -> Tensor:
        """g of the chunk. For symmetric scores it covers both sides of a pair; diagonal chunks hold each twice."""
        launch = self.launch(rows, cols)
        launch.run()
        if self.parts is not None:
            share = 0.5 if self.symmetric and rows == cols else 1.0
            self.sums += self.parts[: launch.grid[0]].sum(0) * share
        return self.sums[:0] if self.grad is None else self.grad[: rows.stop - rows.start, : cols.stop - cols.start]


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _side(name: str, side: SideGrad | None) -> dict[str, Tensor | None]:
    return {f"{name}_lse": None if side is None else side.lse, f"{name}_grad": None if side is None else side.grad}


def _upstream(given: Given) -> list[Tensor]:
    sides = [side.grad for side in (given.row, given.col) if side is not None]
    return sides if given.pos_grad is None else [*sides, given.pos_grad]


def _near_one(given: Given, *, fp16: bool) -> tuple[Given, Tensor]:
    """Divide the upstream gradients by a power of two close to their maximum; return both.

    In fp16 they are kept 12 bits larger, within its range, so that the small weights of large batches stay normal.
    """
    largest = torch.stack([grad.abs().amax() for grad in _upstream(given)]).amax()
    peak = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - (13 if fp16 else 1))
    row, col = (None if side is None else _scaled(side, peak) for side in (given.row, given.col))
    pos_grad = None if given.pos_grad is None else (given.pos_grad / peak).contiguous()
    return Given(row, col, given.pos, pos_grad), peak


def _scaled(side: SideGrad, peak: Tensor) -> SideGrad:
    lse = None if side.lse is None else side.lse.clamp(min=torch.finfo(torch.float32).min).contiguous()
    return SideGrad(lse, (side.grad / peak).contiguous(), None)


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
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
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


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
