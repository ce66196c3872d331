"""How kernels are launched: block sizes, warps and stages by architecture, and how work is cut into launches.

Pure integers, like `plan.py` for the torch backend. The table was chosen from ahead-of-time resource reports
(registers, spills, shared memory; `benchmarks/results/kernels.md`), not by timing.
"""

from typing import NamedTuple

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


_WIDE = Config(128, 128, 64, 8, 3)
_FP32 = Config(128, 128, 32, 8, 3)
_SLIM = Config(128, 64, 32, 8, 3)
_IEEE = Config(64, 64, 32, 4, 2)

TABLE: dict[Arch, dict[str, Config]] = {
    80: {"16-bit": _WIDE, "tf32": _FP32, "tf32x3": _SLIM, "ieee": _IEEE},
    86: {"16-bit": _WIDE, "tf32": _FP32, "tf32x3": _SLIM, "ieee": _IEEE},
    89: {"16-bit": _WIDE, "tf32": _FP32, "tf32x3": _SLIM, "ieee": _IEEE},
    90: {"16-bit": _WIDE, "tf32": _FP32, "tf32x3": _SLIM, "ieee": _IEEE},
    100: {"16-bit": Config(128, 128, 32, 8, 4), "tf32": _SLIM, "tf32x3": _SLIM, "ieee": Config(64, 64, 16, 4, 3)},
    120: {"16-bit": Config(128, 128, 32, 8, 3), "tf32": _SLIM._replace(stages=4), "tf32x3": _SLIM, "ieee": _IEEE},
    "gfx90a": {"16-bit": _WIDE._replace(stages=2), "ieee": _IEEE},
    "gfx942": {"16-bit": _WIDE._replace(stages=2), "tf32": _FP32._replace(stages=2), "ieee": _IEEE},
}
"""fp32 features by the precision of their products; a missing entry means `ieee`. Tiles are narrower where 128 x 128
spills registers. The height is a multiple of the width, which symmetric scores require."""


def known_arch(capability: tuple[int, int]) -> int | None:
    """The entry for an NVIDIA GPU: its own or the closest older one. None before sm_80."""
    number = capability[0] * 10 + capability[1]
    return max((arch for arch in TABLE if isinstance(arch, int) and arch <= number), default=None)


def kind_of(arch: Arch, dtype: torch.dtype, precision: str | None) -> str:
    """The column of the table: how features of this dtype are multiplied."""
    if dtype != torch.float32:
        return "16-bit"
    return precision if precision is not None and precision in TABLE[arch] else "ieee"


def candidates(arch: Arch, kind: str, kernel: str) -> list[Config]:
    """Configurations worth timing for a kernel ("forward" or "gradient"), the table's entry first."""
    default = TABLE[arch][kind]
    others = (
        default._replace(n=max(32, default.n // 2)),
        default._replace(m=max(32, default.m // 2), n=max(32, default.n // 2)),
        default._replace(d=max(16, default.d // 2)),
        default._replace(stages=max(2, default.stages - 1)),
        default._replace(warps=max(4, default.warps // 2), n=max(32, default.n // 2)),
    )
    return list(dict.fromkeys((default, *others)))


def config_for(
    arch: Arch, d: int, kind: str, tile: int | None = None, *, crowded: bool = False, chosen: Config | None = None
) -> Config:
    """The table's entry or what was `chosen` instead; `tile` forces height and width, rounded down to a power of two.

    Calls that keep more in registers (`crowded`: ids, symmetric scores, softplus) use half the width and, without
    tensor cores, half the height. Features that cannot be read 16 bytes at a time halve everything. Short features are
    summed in at least two steps, so that loads and products overlap.
    """
    config = TABLE[arch][kind] if chosen is None else chosen
    uneven = d % 16 != 0
    if tile is not None:
        side = min(128, max(16, 1 << (tile.bit_length() - 1)))
        config = config._replace(m=side, n=side)
    elif uneven:
        config = config._replace(m=config.m // 2, n=config.n // 2, d=config.d // 2)
    elif crowded:
        config = config._replace(m=config.m // 2 if kind == "ieee" else config.m, n=config.n // 2)
    return config._replace(d=max(16, min(config.d, 1 << max(0, d.bit_length() - 2))))


class ForwardCut(NamedTuple):
    """Row blocks of one launch, and columns of one split."""

    blocks: int
    span: int
    splits: int


def cut_forward(n: int, m: int, config: Config, *, processors: int, cols: bool, workspace: int) -> ForwardCut:
    """Row blocks per launch: each leaves partial column statistics (two fp32), so as many as fit into the workspace.

    If these are too few to occupy the GPU four times over, the columns are split among programs.
    """
    blocks = -(-n // config.m)
    if cols:
        blocks = max(1, min(blocks, workspace // (8 * m)))
    tiles = -(-m // config.n)
    splits = min(tiles, max(1, -(-4 * processors // blocks)))
    span = -(-tiles // splits) * config.n
    return ForwardCut(blocks, span, -(-m // span))


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
