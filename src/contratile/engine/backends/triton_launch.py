"""Launches of the kernels as data: what a call's kernels are given, and on what device they run."""

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
from contratile.engine.backends import triton_configs, triton_forward
from contratile.engine.backends.block import Given, KernelError, Scores, SideGrad
from contratile.engine.backends.triton_configs import (
    Arch,
    Config,
    Kernel,
    candidates,
    careful_config,
    config_for,
    fold_of,
    kind_of,
)
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts

INTERPRETED = not hasattr(triton_forward.forward_tiles, "cache_key")
"""TRITON_INTERPRET=1 was set before Triton was imported: kernels run on CPU tensors."""


SMALL: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""Triton's options for launches over vectors."""


READ = ("level", "total", "higher", "equal", "sums", "counts")
"""Statistics that kernels gather."""


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


@cache
def device_name(device: torch.device) -> str:
    """What tuned configurations are recorded under."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_number(x: Tensor, device: torch.device) -> Tensor:
    """A 0-d tensor on the device. A number from the CPU is passed by value: copying would synchronise."""
    return (
        torch.scalar_tensor(x.item(), dtype=torch.float32, device=device) if x.is_cpu else x.to(device, torch.float32)
    )


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class KernelCall:
    """The kernels of a block: their tiles, and the arguments that they share."""

    def __init__(self, scores: Scores, spec: Spec, device: Device) -> None:
        self.scores, self.spec, self.device = scores, spec, device
        self.kind = kind_of(device.arch, scores.q.dtype, spec.precision)
        self.alpha = device_number(scores.alpha, scores.q.device)
        self.bias = None if scores.bias is None else device_number(scores.bias, scores.q.device)
        self.labels = _dense(scores.rule.labels)

    @property
    def forward(self) -> Config:
        return self._config("forward")

    @property
    def gradient(self) -> Config:
        """Limits are compared with products, which must come out the same in both passes: so with the same tiles."""
        if self.spec.filters:
            return self._config("forward")
        config = self._config("gradient")
        plain = self.spec.sums in ("", "differ", "same") and not self.spec.cache_bytes
        if self.spec.hardness and self.device.arch == 90:  # two exponentials per tile: 128 registers spill
            plain = False
        return config if plain else config._replace(registers=256)

    def _config(self, kernel: Kernel) -> Config:
        scores, spec = self.scores, self.spec
        height = self._height(kernel)
        sizes = self.device.arch, scores.q.shape[1], self.kind, spec.tile
        return config_for(*sizes, kernel=kernel, height=height, symmetric=scores.k is None, chosen=self._tuned(kernel))

    def _tuned(self, kernel: Kernel) -> Config | None:
        """The fastest configuration on this device, if it was tuned and is still a candidate."""
        q = self.scores.q
        found = tuned.kernel(kernel, device=device_name(q.device), kind=self.kind, d=q.shape[1])
        known = candidates(self.device.arch, self.kind, kernel) if found else ()
        return next((config for config in known if config == found), None)

    def _height(self, kernel: Kernel) -> int:
        """Height of a tile: the more of it is kept in registers, the lower."""
        spec, arch, kind = self.spec, self.device.arch, self.kind
        if spec.reduce == "softplus" or spec.sums == "equal":
            return 64
        if kernel == "gradient":
            return 128 if spec.sums and kind == "16-bit" else 256
        unfolded = fold_of(arch, kind, candidates(arch, kind, kernel)[0]).pair == 1
        many = (spec.ranks and (self.scores.k is None or kind == "tf32x3")) or (unfolded and (spec.ranks or spec.sums))
        if many or spec.ties or spec.cache_bytes or (spec.sums and kind == "ieee"):
            return 64
        by_key = self.scores.rule.query_ids is not None or self.scores.col_bias is not None
        more = spec.ranks or spec.sums or spec.filters or spec.hardness or by_key
        if arch == 100:  # products come from tensor memory, one row to a thread
            return 64 if more or self.scores.k is None else 128
        if arch == 120 and spec.filters:
            return 64
        return 128 if more else 256

    def features(self, config: Config) -> dict[str, Any]:
        """What a tile of products is made of."""
        q, key = self.scores.q, self.scores.key
        return {
            "query": q,
            "key": key,
            **{"N": len(q), "M": len(key), "D": q.shape[1]},
            **{"q_row": q.stride(0), "q_col": q.stride(1), "k_row": key.stride(0), "k_col": key.stride(1)},
            "PRECISION": "ieee" if self.kind == "16-bit" else self.kind,
            "EVEN_D": q.shape[1] % config.d == 0,
            **{"BLOCK_M": config.m, "BLOCK_N": config.n, "BLOCK_D": config.d},
        }

    def _rule(self, config: Config) -> dict[str, Any]:
        """Which pairs count, and which scores are summed."""
        scores, rule, spec = self.scores, self.scores.rule, self.spec
        bounds: dict[str, Any] = {"label_low": None, "label_high": None}
        if self.labels is not None:
            blocks = -(-len(scores.q) // config.m)
            bounds = {name: self.labels.new_empty(blocks) for name in bounds}
        return {
            "row_alpha": None if scores.hardness is None else device_number(scores.hardness, scores.q.device),
            **{"alpha": self.alpha, "bias": self.bias, "col_bias": _dense(scores.col_bias), "labels": self.labels},
            **bounds,
            "query_ids": _dense(rule.query_ids),
            "key_ids": _dense(rule.key_ids),
            "block_ids": None if rule.key_ids is None else sorted_hashes(rule.key_ids, config.n),
            "query_classes": _dense(scores.query_classes) if spec.sums == "equal" else None,
            "key_classes": _dense(scores.key_classes) if spec.sums == "equal" else None,
            "row_limit": _limit(scores.row_level, spec),
            "SOFTPLUS": spec.reduce == "softplus",
            "SELF": rule.exclude_self,
            "SYMMETRIC": scores.k is None,
            "MORE": spec.same_id == "positive" and rule.query_ids is not None,
            "SUMS": spec.sums,
            **self._cache(),
        }

    def _cache(self) -> dict[str, Any]:
        """Products of the first rows, as many as fit; those of symmetric scores are not kept."""
        kept = self.scores.cache
        rows = 0 if self.scores.k is None or kept is None else len(kept) // len(self.scores.key)
        step = max(self.forward.m, self.gradient.m)
        if rows >= len(self.scores.q):  # up to the last whole tile of the forward pass
            rows, step = len(self.scores.q), careful_config(self.device.arch, self.forward).m
        rows = rows // step * step
        return {"cache": kept if rows else None, "cached_rows": rows}

    def bounds(self, config: Config, arguments: dict[str, Any]) -> Iterator[Launch]:
        """The launch that fills the bounds of the labels."""
        if self.labels is not None:
            given = {"labels": self.labels, "low": arguments["label_low"], "high": arguments["label_high"]}
            given |= {"N": len(self.labels), "BLOCK": config.m}
            yield Launch(triton_forward.label_bounds, (-(-len(self.labels) // config.m),), given, SMALL)

    def statistics(self, config: Config, row: SideParts, col: SideParts) -> dict[str, Any]:
        """The arguments of `forward_tiles`, fast, that do not depend on how the work is cut."""
        scores, spec = self.scores, self.spec
        symmetric = scores.k is None
        arguments = self.features(config) | self._rule(config)
        arguments |= {f"row_{name}": getattr(row, name) for name in READ}
        arguments |= {f"col_{name}": getattr(col, name) for name in READ}
        row_bar = scores.row_level if spec.ranks else None
        col_bar = scores.col_level if spec.ranks and spec.cols else None
        col_bar = row_bar if symmetric else col_bar
        if spec.ranks and spec.cols and col_bar is None and not symmetric:
            col_bar = scores.q.new_full((len(scores.key),), torch.inf, dtype=torch.float32)
        arguments |= {"row_bar": _dense(row_bar), "col_bar": _dense(col_bar)}
        arguments["col_limit"] = _limit(scores.col_level, spec) if spec.cols else None
        if symmetric:
            arguments["col_limit"] = arguments["row_limit"]
        arguments["CAREFUL"], arguments["RISING"] = False, spec.filters or spec.ties
        return arguments | self._fold(config) | {"TILE_M": config.m}

    def _fold(self, config: Config, *, across: bool = False) -> dict[str, int]:
        fold = fold_of(self.device.arch, self.kind, config)
        return {"DOWN": fold.down, "PAIR": fold.pair, **({"ACROSS": fold.across} if across else {})}

    def fast(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the fast launch. For a negative alpha the bars (positives' products) are negated, not tiles:

        -p > bar means p < -bar, that is: p is not above the number just below -bar.
        """
        if arguments["RISING"] or not self.spec.ranks:
            return arguments
        lowest = torch.full_like(self.alpha, -torch.inf)
        bars = {name: arguments[name] for name in ("row_bar", "col_bar") if arguments[name] is not None}
        return arguments | {
            name: torch.where(self.alpha < 0, torch.nextafter(-x, lowest), x) for name, x in bars.items()
        }

    def careful(self, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The arguments of the careful launches: log-sum-exps first, then other statistics, to save registers."""
        ranks, sums = (
            [f"{side}_{name}" for side in ("row", "col") for name in names]
            for names in (("higher", "equal"), ("sums", "counts"))
        )
        other = ranks + sums
        totals = [f"{side}_{name}" for side in ("row", "col") for name in ("level", "total")]
        config = careful_config(self.device.arch, self.forward, forward=True)
        arguments = arguments | {"CAREFUL": True, "RISING": True} | self._fold(config)
        arguments |= {"BLOCK_M": config.m, "BLOCK_D": config.d}
        yield arguments | dict.fromkeys(other) | {"SUMS": ""}
        rest = arguments | dict.fromkeys(totals) | {"cache": None}
        if arguments["MORE"] and self.spec.ranks:  # masks of positives leave registers for one kind
            yield rest | dict.fromkeys(sums) | {"SUMS": ""}
            rest |= dict.fromkeys(ranks)
        if any(rest[name] is not None for name in other):
            yield rest

    def gradients(self, config: Config, given: Given) -> dict[str, Any]:
        """The arguments of `gradient_tiles` that do not depend on how the work is cut."""
        arguments = self.features(config) | self._rule(config)
        del arguments["N"]
        symmetric = self.scores.k is None
        row, col = given.row, given.row if symmetric else given.col
        arguments |= _side("row", row) | _side("col", col)
        arguments |= {"row_sums_grad": given.row_sums, "col_sums_grad": given.row_sums if symmetric else given.col_sums}
        if given.row_sums is None and given.col_sums is None:
            arguments["SUMS"] = ""
        arguments["col_limit"] = None if given.col is None else _limit(given.col.level, self.spec)
        if symmetric:
            arguments["col_limit"] = arguments["row_limit"]
        arguments |= dict.fromkeys(("shift", "row_weight", "col_weight", "row_far", "col_far"))
        if row is not None and col is not None and row.lse is not None and col.lse is not None:
            if not self.spec.filters and not self.spec.hardness:  # with them the sides differ in scores
                arguments |= _shared(row.lse, col.lse, config)
        arguments |= {"CAREFUL": False, "RISING": self.spec.filters, "TILE_M": config.m}
        return arguments | self._fold(config, across=True)

    def careful_gradients(self, config: Config) -> dict[str, Any]:
        """What differs in the careful launch."""
        return {"CAREFUL": True, "RISING": True, "BLOCK_M": config.m} | self._fold(config, across=True)


def sorted_hashes(ids: Tensor, block: int) -> Tensor:
    """The ids of each block as sorted hashes (`triton_tile.hashed`); the last block repeats its last id."""
    hashes = (ids ^ (ids >> 32)).to(torch.int32)
    lacking = -len(hashes) % block
    if lacking:
        hashes = torch.cat([hashes, hashes[-1:].expand(lacking)])
    return hashes.view(-1, block).sort(1).values.contiguous()


def _limit(level: Tensor | None, spec: Spec) -> Tensor | None:
    return (level - spec.margin).contiguous() if level is not None and spec.filters else None


def _side(name: str, side: SideGrad | None) -> dict[str, Tensor | None]:
    return {f"{name}_lse": None if side is None else side.lse, f"{name}_grad": None if side is None else side.grad}


def _shared(row: Tensor, col: Tensor, config: Config) -> dict[str, Tensor]:
    """Room for the weights of both sides, and a shift for both: the median, which a few outliers do not move."""

    def far(x: Tensor, block: int) -> Tensor:
        return x.new_empty(-(-len(x) // block), dtype=torch.int32)

    return {
        "shift": row.median(),
        **{"row_weight": torch.empty_like(row), "col_weight": torch.empty_like(col)},
        **{"row_far": far(row, config.m), "col_far": far(col, config.n)},
    }
