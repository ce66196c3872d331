"""How kernels are launched: block sizes, warps and stages by architecture, and how work is cut into launches.

Pure integers, like `plan.py` for the torch backend. The table was chosen from ahead-of-time resource reports
(registers, spills, shared memory; `benchmarks/results/kernels.md`), not by timing.
"""

from typing import Any, Literal, NamedTuple

import torch

Arch = int | str
"""80, 86, ... of an NVIDIA GPU (sm_80), or the name of an AMD GPU."""

WORKSPACE_BYTES = 64 << 20
"""Memory for what one launch passes to the next: a chunk of score gradients, or partial column statistics."""


class Config(NamedTuple):
    """A tile of m x n scores, summed over d features at a time."""

    m: int
    n: int
    d: int
    warps: int
    stages: int
    registers: int = 256
    """Upper limit per thread; 256 is more than there are and leaves it to the compiler."""

    def options(self) -> dict[str, Any]:
        """Triton's options for a launch."""
        limit = {} if self.registers > 255 else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True, **limit}


Kernel = Literal["forward", "gradient"]


class Candidates(NamedTuple):
    """Configurations of both kernels; the first of each is the default."""

    forward: tuple[Config, ...]
    gradient: tuple[Config, ...]


def _both(*configs: Config) -> Candidates:
    return Candidates(configs, configs)


_WIDE = Config(128, 128, 64, 8, 3)
_TALL = Config(256, 128, 32, 8, 3)
_FLAT = Config(64, 128, 64, 4, 3)
_SLIM = Config(128, 64, 64, 4, 3)
_TWO = Config(128, 128, 64, 8, 3, registers=128)
_FP32 = Config(128, 128, 32, 8, 3)
_THRICE = Config(128, 64, 32, 8, 3)
_IEEE = Config(64, 64, 32, 4, 2, registers=255)
_AMD = Config(64, 64, 32, 4, 2)
_FULL = Candidates((_WIDE, _TALL, _FLAT, _SLIM), (_TWO, _WIDE._replace(n=256), _FLAT, _SLIM))
_ONE = _FULL._replace(gradient=(_WIDE, _WIDE._replace(n=256), _FLAT, _SLIM))  # shared memory for one block

TABLE: dict[Arch, dict[str, Candidates]] = {
    80: {"16-bit": _FULL, "tf32": _both(_FP32), "tf32x3": _both(_THRICE), "ieee": _both(_IEEE)},
    86: {"16-bit": _ONE, "tf32": _both(_FP32), "tf32x3": _both(_THRICE), "ieee": _both(_IEEE)},
    89: {"16-bit": _ONE, "tf32": _both(_FP32), "tf32x3": _both(_THRICE), "ieee": _both(_IEEE)},
    90: {
        "16-bit": _FULL._replace(forward=(_TALL, _WIDE, _FLAT, _SLIM)),
        "tf32": _both(_THRICE),
        "tf32x3": _both(_THRICE),
        "ieee": _both(_IEEE),
    },
    100: {
        "16-bit": Candidates((Config(128, 128, 32, 8, 4),), (Config(128, 128, 32, 8, 4), Config(128, 64, 32, 8, 3))),
        "tf32": _both(_THRICE),
        "tf32x3": _both(_THRICE),
        "ieee": _both(Config(64, 64, 16, 4, 3)),
    },
    120: {
        "16-bit": _both(Config(128, 128, 32, 8, 3)),
        "tf32": _both(_THRICE._replace(stages=4)),
        "tf32x3": _both(Config(64, 64, 16, 4, 3, registers=255)),
        "ieee": _both(Config(64, 64, 16, 4, 2)),
    },
    "gfx90a": {"16-bit": _both(_WIDE._replace(stages=2)), "ieee": _both(_AMD)},
    "gfx942": {
        "16-bit": _both(_WIDE._replace(stages=2)),
        "tf32": _both(_FP32._replace(stages=2)),
        "ieee": _both(_AMD),
    },
}
"""fp32 features by the precision of their products; a missing entry means `ieee`. All candidates compile without
spills, also
for calls that keep more in registers (`config_for`)."""


def candidates(arch: Arch, kind: str, kernel: Kernel) -> tuple[Config, ...]:
    """Configurations worth timing, the default first."""
    found = TABLE[arch][kind]
    return found.forward if kernel == "forward" else found.gradient


def known_arch(capability: tuple[int, int]) -> int | None:
    """The entry for an NVIDIA GPU: its own or the closest older one. None before sm_80."""
    number = capability[0] * 10 + capability[1]
    return max((arch for arch in TABLE if isinstance(arch, int) and arch <= number), default=None)


def kind_of(arch: Arch, dtype: torch.dtype, precision: str | None) -> str:
    """The column of the table: how features of this dtype are multiplied."""
    if dtype != torch.float32:
        return "16-bit"
    return precision if precision is not None and precision in TABLE[arch] else "ieee"


def config_for(
    arch: Arch,
    d: int,
    kind: str,
    tile: int | None = None,
    *,
    kernel: Kernel = "forward",
    height: int = 256,
    symmetric: bool = False,
    chosen: Config | None = None,
) -> Config:
    """The table's default, or what was `chosen` instead; `tile` forces height and width, rounded down to a power of
    two.

    Calls that keep more in registers limit the height to 128 or 64; without tensor cores, and on sm_100, 64 also halves
    both. Features that cannot be read 16 bytes at a time halve everything. Tiles of symmetric scores are square. Short
    features are summed in at least two steps, so that loads and products overlap.
    """
    config = candidates(arch, kind, kernel)[0] if chosen is None else chosen
    uneven = d % 16 != 0
    if tile is not None:
        side = min(128, max(16, 1 << (tile.bit_length() - 1)))
        config = config._replace(m=side, n=side)
    elif uneven:
        config = config._replace(m=min(128, config.m) // 2, n=config.n // 2, d=config.d // 2)
    elif height <= 64 and kind == "ieee":
        limit = 255 if isinstance(arch, int) else 256  # without a limit the assembler spills early
        config = config._replace(m=config.m // 2, n=config.n // 2, d=config.d // 2, registers=limit)
    elif height <= 64 and kind == "tf32x3":
        config = config._replace(d=config.d // 2)
    elif height <= 64 and arch == 100 and kind == "16-bit":
        config = config._replace(m=config.m // 2, n=config.n // 2)
    config = config._replace(m=min(config.m, height))
    if symmetric:
        side = min(config.m, config.n)
        config = config._replace(m=side, n=side)
    return config._replace(d=max(16, min(config.d, 1 << max(0, d.bit_length() - 2))))


class Fold(NamedTuple):
    """Where a thread's numbers lie in a tile of a product: `triton_forward.folded`."""

    down: int
    """Warps below each other."""

    pair: int
    """2 if a thread has rows 8 apart in pairs."""

    across: int
    """Warps side by side."""


def fold_of(arch: Arch, kind: str, config: Config) -> Fold:
    """mma.sync (sm_80 to 89, 120) puts a quarter of the warps below each other, wgmma (sm_90) as many as there is room.

    Others are not folded: on sm_100 and AMD a thread has one row, and products without tensor cores have another
    layout.
    """
    m, n, warps = config.m, config.n, config.warps
    if kind == "ieee" or not isinstance(arch, int) or arch == 100:
        return Fold(m // 8, 1, 1)
    down = max(1, min(warps if arch == 90 else warps // 4, m // 16))
    return Fold(down, 2, max(1, min(warps // down, n // 8)))


def careful_config(arch: Arch, config: Config, *, forward: bool = False) -> Config:
    """Careful launches keep more in registers, so their tiles are low. Only mma.sync takes fewer than 64 rows.

    Forward on sm_90 what 64 rows keep fits into the registers of eight warps, with short steps of features.
    """
    rows = 32 if arch in (80, 86, 89, 120) else 64
    if forward and arch == 90 and config.d > 32:
        config = config._replace(d=32, warps=8)
    return config._replace(m=min(config.m, rows), registers=255 if isinstance(arch, int) else 256)


class ForwardCut(NamedTuple):
    """Column blocks of one launch, and rows of one split."""

    blocks: int
    span: int
    splits: int


def cut_forward(n: int, m: int, config: Config, *, processors: int, fields: int, workspace: int) -> ForwardCut:
    """Column blocks per launch: each leaves partial statistics of all rows (`fields` fp32), as many as fit into the
    workspace.

    If these are too few to occupy the GPU four times over, the rows are split among programs.
    """
    blocks = max(1, min(-(-m // config.n), workspace // (4 * max(1, fields) * n)))
    tiles = -(-n // config.m)
    splits = min(tiles, max(1, -(-4 * processors // blocks)))
    span = -(-tiles // splits) * config.m
    return ForwardCut(blocks, span, -(-n // span))


class BackwardCut(NamedTuple):
    """Rows and columns of a chunk of gradients."""

    rows: int
    cols: int


def cut_backward(n: int, m: int, config: Config, *, itemsize: int, symmetric: bool, workspace: int) -> BackwardCut:
    """Chunks that fit into the workspace, twice as tall as wide (square for symmetric scores).

    They end at tile borders, or with the last row and column. Products of a chunk are large in every dimension; taller
    chunks pass over the key gradients less often.
    """
    area = workspace // itemsize
    step = config.m if symmetric else config.n
    cols = int((area if symmetric else area // 2) ** 0.5) // step * step
    cols = max(step, min(cols, -(-m // step) * step))
    rows = cols if symmetric else max(config.m, area // cols // config.m * config.m)
    return BackwardCut(min(rows, n), min(cols, m))
