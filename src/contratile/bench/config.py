"""The options that benchmarks share."""

from dataclasses import dataclass
from pathlib import Path

from contratile.bench.clock import Clock, CpuClock
from contratile.errors import bad_value, check_count


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of every benchmark. The command line is made from these fields."""

    contestants: tuple[str, ...]
    """Which implementations to compare."""

    dims: tuple[int, ...] = (512,)
    """Feature sizes D."""

    threads: int
    """Number of torch threads."""

    patience: float = 60.0
    """Skip steps that are expected, from smaller sizes, to take longer than this many seconds."""

    out: Path
    """Folder for the results."""

    quick: bool = False
    """Start from smaller defaults that finish in about two minutes; other options still apply."""

    def __post_init__(self) -> None:
        for d in self.dims:
            check_count("dims", d, least=1)
        check_count("threads", self.threads, least=1)
        for name in ("dims", "contestants"):
            if not getattr(self, name):
                bad_value(name, expected="at least one", got="none", remedy="Leave it out for the default.")

    @property
    def all_sizes(self) -> list[int]:
        """Batch sizes at which anything is measured, ascending."""
        raise NotImplementedError

    def clock(self) -> Clock:
        """Return the clock of the device that is measured."""
        return CpuClock()


@dataclass(frozen=True, kw_only=True)
class TimedConfig(BenchConfig):
    """Options of a benchmark that measures time."""

    rounds: int
    """How often each contestant is timed at each size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rounds", self.rounds, least=1)


@dataclass(frozen=True, kw_only=True)
class LocalConfig(TimedConfig):
    """Options of a benchmark in one process."""

    sizes: tuple[int, ...]
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...]
    """Batch sizes N to measure peak memory at; may be larger than those that are timed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sizes", "memory_sizes"):
            for value in getattr(self, name):
                check_count(name, value, least=1)

    @property
    def all_sizes(self) -> list[int]:
        return sorted({*self.sizes, *self.memory_sizes})


def check_positive_scale(scale: float) -> None:
    """Raise ValueError unless the scale is positive."""
    if not scale > 0:
        bad_value("scale", expected="a positive number", got=scale, remedy="CLIP starts at 14.3.")
