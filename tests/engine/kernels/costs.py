"""Writes src/contratile/planner/second_generation.py: what every launch candidate executes per score and occupies.

    python -m tests.engine.kernels.costs            (part of make kernels)

Registers and shared memory are of the fast launch of a plain `clip_loss` at D = 512, compiled for each architecture.
Instructions are counted where the disassembler tells (NVIDIA, tensor cores); other candidates borrow those of 16-bit
features on sm_80.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from contratile.engine.backends import triton_launch
from contratile.engine.backends.triton_configs import TABLE, Arch, Config, Kernel, candidates
from contratile.engine.backends.triton_launch import Launch
from contratile.planner.kernel_costs import Row
from tests.engine.kernels.ahead_of_time import name_of, report
from tests.engine.kernels.instructions import counted
from tests.engine.kernels.samples import fast, sample_launches

OUT = Path(__file__).parents[3] / "src/contratile/planner/second_generation.py"
D = 512
KERNELS: tuple[Kernel, ...] = ("forward", "gradient")
PAGE = '''"""What the launch candidates execute per score and occupy. Written by `make kernels`; do not edit it by hand.

`kernel_costs` explains the columns.
"""

from contratile.engine.backends.triton_configs import Arch

Row = tuple[str, str, int, int, int, int, int, int, int, float, float, float, float, Arch]

SECOND_GENERATION: dict[Arch, list[Row]] = {{
{rows}}}
'''


def launch_of(arch: Arch, kind: str, kernel: Kernel, config: Config) -> Launch:
    """The fast launch of a kernel with a configuration."""
    dtype = torch.bfloat16 if kind == "16-bit" else torch.float32
    with patch.object(triton_launch, "config_for", lambda *_, **__: config):
        launches = fast(sample_launches(arch, D, dtype, "ieee" if kind == "16-bit" else kind))
    return next(launch for launch in launches if launch.kernel.__name__.startswith(kernel))


def row_of(arch: Arch, kind: str, kernel: Kernel, config: Config) -> Row:
    """One candidate."""
    uses = report(launch_of(arch, kind, kernel, config), arch)
    known = isinstance(arch, int) and kind == "16-bit"
    on: Arch = arch if known else 80
    like = config if known else candidates(80, "16-bit", kernel)[0]
    assert isinstance(on, int)
    found = counted(launch_of(on, "16-bit", kernel, like), on)
    exp2, shuffles = (round(found.by_class[name], 2) for name in ("exp2", "shuffles"))
    fp32 = round(found.by_class["adds"] + found.by_class["fma, mul"], 2)
    other = round(found.total - exp2 - shuffles, 2)
    return (kernel, kind, *config[:5], uses.registers, uses.shared, exp2, shuffles, other, fp32, on)


def rows(arch: Arch, notify: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """All candidates of an architecture."""
    for kind in TABLE[arch]:
        for kernel in KERNELS:
            for config in candidates(arch, kind, kernel):
                notify(f"{name_of(arch)} {kind} {kernel} {tuple(config)}")
                yield row_of(arch, kind, kernel, config)


def main() -> int:
    def notify(text: str) -> None:
        print(text, file=sys.stderr)

    lines = []
    for arch in TABLE:
        lines.append(f"    {arch!r}: [\n".replace("'", '"'))
        lines += [f"        {row!r},\n".replace("'", '"') for row in rows(arch, notify)]
        lines.append("    ],\n")
    unfinished = OUT.with_suffix(".part")
    unfinished.write_text(PAGE.format(rows="".join(lines)))
    unfinished.replace(OUT)
    print(f"written: {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
