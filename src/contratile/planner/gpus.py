"""GPUs and their rates: the one table that everything in the library reads.

Figures are of the vendor's datasheet or architecture whitepaper unless `source` says otherwise. They are inputs of
predictions, not measurements of this project.

    >>> from contratile.planner.gpus import find
    >>> find("h100").processors
    132
    >>> find("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from contratile.engine.backends.triton_configs import Arch
from contratile.errors import bad_value


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One multiprocessor (SM) or compute unit (CU): what all GPUs of an architecture share."""

    arch: Arch
    """The entry of `triton_configs.TABLE`."""

    flops_per_clock: Mapping[str, float]
    """Dense product flops per clock by kind (`16-bit`, `tf32`, `tf32x3`, `ieee`), with fp32 accumulation. A
    multiply-add is two flops. `ieee` means CUDA cores on NVIDIA, fp32 matrix instructions on AMD; `tf32x3` is a third
    of `tf32`. Missing kinds run as `ieee`."""

    exp2_per_clock: int
    """Results of exp2 per clock, all lanes: the special function units."""

    shuffles_per_clock: int
    """Lanes shuffled per clock."""

    issue_per_clock: int
    """Lane-instructions issued per clock, all classes together: schedulers times lanes of a warp."""

    fp32_per_clock: int
    """Lanes of fp32 additions, products and FMAs per clock; fewer than are issued on GA100."""

    warp_size: int
    """Lanes of a warp or wave."""

    registers: int
    """32-bit registers; on AMD the accumulation registers are included."""

    threads: int
    """Most resident threads."""

    blocks: int
    """Most resident blocks."""

    shared_bytes: int
    """Shared memory (LDS) of all resident blocks."""

    shared_bytes_of_a_block: int
    """Most shared memory that one block may have."""

    reserved_shared_bytes: int
    """Shared memory that the driver takes from each block."""

    cluster: int
    """Processors for which a library product loads a tile at once: 2 where blocks form clusters with multicast, else 1.
    Triton kernels of this library load for themselves."""

    source: str
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as PyTorch sees it: one device."""

    name: str
    """What people type: "A100-80GB"."""

    aliases: tuple[str, ...] = ()
    """Other names of the same device."""

    processor: Processor
    """One of its multiprocessors."""

    processors: int
    """How many multiprocessors or compute units are enabled."""

    clock: float
    """Hz, the boost clock for which the vendor states the peak of products."""

    sustained: float
    """Share of that peak which the best large 16-bit library product reaches: power limits and software together."""

    sustained_source: str
    """Who measured `sustained`, or that it is assumed."""

    l2_bytes: int
    """Size of the last cache before DRAM: L2, on MI300X the Infinity Cache."""

    l2_bandwidth: float
    """Bytes per second from that cache to all multiprocessors, as measured or estimated, not the theoretical peak."""

    l2_source: str
    """Who measured `l2_bandwidth`, or how it is estimated."""

    dram_bytes: int
    """Size of device memory."""

    dram_bandwidth: float
    """Bytes per second of device memory, as stated by the vendor."""

    link_bandwidth: float
    """Bytes per second that one device can send to others of its node while it receives as many: NVLink, Infinity
    Fabric, else PCIe."""

    link_source: str
    """The link that `link_bandwidth` describes, and where the figure comes from."""

    source: str
    """Where the remaining figures come from."""

    @property
    def arch(self) -> Arch:
        return self.processor.arch

    def kind(self, kind: str) -> str:
        """The kind of product that runs: a missing one runs as `ieee`."""
        return kind if kind in self.processor.flops_per_clock else "ieee"

    def peak(self, kind: str = "16-bit") -> float:
        """Dense flops per second of products of a kind.

        >>> from contratile.planner.gpus import find
        >>> round(find("A100").peak() / 1e12)
        312
        """
        return self.processor.flops_per_clock[self.kind(kind)] * self.processors * self.clock

    @property
    def l2_bytes_per_clock(self) -> float:
        """Bytes that a multiprocessor gets from the cache per clock while all of them load."""
        return self.l2_bandwidth / (self.processors * self.clock)


def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the table, in the table's order.

    >>> "H100-SXM" in [gpu.name for gpu in all_gpus()]
    True
    """
    from contratile.planner.gpu_table import GPUS

    return GPUS


def find(name: str) -> Gpu:
    """A GPU by the name people type, or by `torch.cuda.get_device_name()`.

    Upper and lower case, spaces, hyphens and underscores do not matter. A name without a variant means the table's
    first one ("H100" is the SXM module).

    Args:
        name: For example "H100", "a100 40gb", "MI300X" or "NVIDIA GeForce RTX 4090".

    Returns:
        The entry of the table.

    Raises:
        ValueError: No GPU of the table has this name. The message lists those that exist.

    Example:
        >>> find("NVIDIA H100 80GB HBM3").name, find("rtx4090").name, find("A800-80G").name
        ('H100-SXM', 'RTX-4090', 'A800-80GB')
    """
    wanted = _words(name)
    names = [(_words(alias), gpu) for gpu in all_gpus() for alias in (gpu.name, *gpu.aliases)]
    for words, gpu in names:
        if "".join(words) == "".join(wanted):
            return gpu
    # A device name holds more words than an entry: "NVIDIA A100-SXM4-80GB-2". The longest match decides.
    begun = [(len(words), -at, gpu) for at, (words, gpu) in enumerate(names) if wanted[: len(words)] == words]
    if begun:
        return max(begun, key=lambda match: match[:2])[2]
    known = ", ".join(gpu.name for gpu in all_gpus())
    remedy = (
        "Describe another one: contratile plan --devices 8 --device-memory GB --device-flops TFLOPS, or in Python a "
        "`planner.gpus.Gpu`."
    )
    bad_value("gpu", expected=f"one of {known}", got=repr(name), remedy=remedy)


def _words(name: str) -> list[str]:
    """Lower case, without the vendor, gigabytes as "80g"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [re.sub(r"^(\d+g)b$", r"\1", word) for word in words if word not in _VENDORS]


_VENDORS = ("nvidia", "amd", "geforce", "instinct")
