"""Compiles kernels for GPUs that are not here, and reports what they use of them.

    with recorded() as launches:  # host code runs as usual, kernels do not
        host_function(...)
    for launch in launches:
        print(report(launch, 90))  # sm_90; "gfx942" is AMD's

A launch is specialised as triton's JIT does it at run time: pointers and sizes that are multiples of 16, sizes of 1 and
constants come from the very arguments that the host code passed. Compiling never fails for want of shared memory or
tensor memory: `Report.problems` compares with what the target has.
"""

import io
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from contratile.engine.backends.triton_launch import Launch

Target = int | str
TARGETS: tuple[Target, ...] = (80, 86, 89, 90, 100, 120, "gfx90a", "gfx942")

SHARED_LIMIT: dict[Target, int] = {
    **{80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376},
    **{"gfx90a": 65_536, "gfx942": 65_536},
}
"""Bytes of shared memory (AMD: LDS) that a block may have."""

TMEM_LIMIT = 512
"""Columns of tensor memory, sm_100."""


class Report(NamedTuple):
    """What a compiled kernel uses."""

    kernel: str
    target: Target
    num_warps: int
    num_stages: int
    registers: int
    """of a thread"""

    spills: int
    """bytes that a thread stores and loads because registers ran out"""

    shared: int
    """bytes of a block"""

    tmem: int
    """columns of tensor memory"""

    mma: dict[str, int]
    """tensor-core instructions by name"""

    copies: dict[str, int]
    """asynchronous copies into shared memory by name: cp.async, TMA"""

    narrow: int
    """stores of 2 bytes to memory"""

    traps: bool

    @property
    def problems(self) -> list[str]:
        """Why it would not run, or not well."""
        found = []
        if self.shared > SHARED_LIMIT[self.target]:
            found.append(f"{self.shared} bytes of shared memory, {SHARED_LIMIT[self.target]} are there")
        if self.tmem > TMEM_LIMIT:
            found.append(f"{self.tmem} columns of tensor memory, {TMEM_LIMIT} are there")
        if self.traps:
            found.append("compiled to a trap")
        if self.spills:
            found.append(f"{self.spills} bytes of spills")
        if self.narrow:
            found.append(f"{self.narrow} stores of 2 bytes")
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in {**self.mma, **self.copies}.items())
        size = f"{self.registers} registers, {self.spills} spill, {self.shared / 1024:.0f}K shared"
        return f"{self.kernel} {name_of(self.target)} {self.num_warps}w{self.num_stages}s: {size}, {counts}"


def name_of(target: Target) -> str:
    return f"sm_{target}" if isinstance(target, int) else target


@contextmanager
def recorded(instead: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Inside, kernels are not launched but listed, and given to `instead`."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given.update((name, kwargs.pop(name)) for name in kernel.arg_names if name in kwargs)
        launches.append(Launch(kernel, tuple(grid(given) if callable(grid) else grid), given, kwargs))
        if instead is not None:
            instead(launches[-1])

    stock = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = stock


def compiled(launch: Launch, target: Target) -> tuple[Any, str]:
    """The kernel as triton would compile it for this launch, and what the assembler said about it."""
    gpu = GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64)
    source, options = _specialised(launch, gpu)
    key = source.hash(), target, str(sorted(options.items()))
    if key not in _compiled:
        said = io.StringIO()
        with ExitStack() as scopes:
            for knob in (knobs.cache, knobs.compilation, knobs.nvidia):
                scopes.enter_context(knob.scope())
            # A cached kernel would come without the assembler's words.
            knobs.cache.dir = scopes.enter_context(tempfile.TemporaryDirectory())
            knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
            with redirect_stdout(said):
                kernel = triton.compile(source, target=gpu, options=options)
            _ = kernel.asm  # read while the folder is there
        _compiled[key] = kernel, said.getvalue()
    return _compiled[key]


_compiled: dict[Any, tuple[Any, str]] = {}


def _specialised(launch: Launch, gpu: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """As `JITFunction.run` does it."""
    kernel, backend = launch.kernel, make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, **launch.options)
    _, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), options


def report(launch: Launch, target: Target) -> Report:
    """Compile, and read what it uses."""
    kernel, said = compiled(launch, target)
    name, metadata = launch.kernel.fn.__name__, kernel.metadata
    warps, stages = metadata.num_warps, metadata.num_stages
    if isinstance(target, int):
        ptx = kernel.asm["ptx"]
        spills = _number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said)
        registers = _number(r"Used (\d+) registers", said)
        assert registers, f"{name}: the assembler said nothing of registers"
        copies = {"cp.async": r"\bcp\.async\.c[ag]\.", "TMA": r"\bcp\.async\.bulk\.tensor"}
        return Report(
            *(name, target, warps, stages, registers, spills, metadata.shared, metadata.tmem_size or 0),
            mma=dict(Counter(re.findall(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx))),
            copies={copy: count for copy, form in copies.items() if (count := len(re.findall(form, ptx)))},
            narrow=len(re.findall(r"\bst\.global\S*\.[bu]16\b", ptx)),
            traps=bool(re.search(r"^\s*trap;", ptx, re.MULTILINE)),
        )
    code = kernel.asm["amdgcn"]
    lanes_spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", code)
    return Report(
        *(name, target, warps, stages, _number(r"\.vgpr_count:\s+(\d+)", code), 4 * lanes_spilled, metadata.shared, 0),
        mma=dict(Counter(re.findall(r"\b(v_mfma)_\w+", code))),
        copies={},
        narrow=len(re.findall(r"\b(?:global|buffer)_store_short\b", code)),
        traps="s_trap" in code,
    )


def _number(form: str, text: str) -> int:
    found = re.search(form, text)
    return int(found[1]) if found else 0
