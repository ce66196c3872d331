"""Fair timing: contestants take turns, and each turn is preceded by one of the limit.

    limit = GemmLimit(n, d)
    turns = interleave({"dense": step_1, "contratile": step_2}, limit, rounds=5)
    turns["dense"].best, turns["dense"].limit

Other users of a machine slow it down for seconds at a time, so the best turn of a contestant is compared with the best
of all turns of the limit at that size. The limit does the matrix products of a step and nothing else.
"""

import contextlib
import gc
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import median

import torch

from contratile.bench.clock import Step, wall_time

PRODUCTS = 4
"""Matrix products of 2 N^2 D flops in a step that keeps no scores: one forward, three backward."""

CALLS, TURN = 5, 0.1
"""A turn repeats short calls, up to this many and this many seconds: one short call measures scheduler noise."""

Timer = Callable[[Step], float]
Notify = Callable[[str], None]


class GemmLimit:
    """The matrix products of a step, N x M x D (M defaults to N), in blocks of up to 4096 x 4096 x D.

    `beside` adds (number of products, features) of another model.
    On a GPU they have the dtype of the features; CPUs compute 16-bit features in fp32.
    """

    EDGE = 4096

    def __init__(
        self,
        n: int,
        d: int,
        m: int | None = None,
        *,
        products: int = PRODUCTS,
        beside: tuple[int, int] = (0, 0),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rows, self.cols = ([min(self.EDGE, x - at) for at in range(0, x, self.EDGE)] for x in (n, m or n))
        self.sides: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for count, features in ((products, d), beside):
            a, b = (torch.randn(size[0], features, device=device).to(dtype) for size in (self.rows, self.cols))
            self.sides.append((count, a, b))
        self.out = torch.empty(self.rows[0] * self.cols[0], device=device, dtype=dtype)

    def __call__(self) -> None:
        for products, a, b in self.sides:
            for rows, cols in products * [*product(self.rows, self.cols)]:
                torch.mm(a[:rows], b[:cols].t(), out=self.out[: rows * cols].view(rows, cols))


@dataclass(kw_only=True)
class Turns:
    """Seconds of a contestant's calls, and of the limit's calls at the same size (shared by all contestants)."""

    steps: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def best(self) -> float:
        return min(self.steps)

    @property
    def median(self) -> float:
        return median(self.steps)

    @property
    def limit(self) -> float:
        return min(self.limits)


def turn(step: Step, clock: Timer = wall_time) -> list[float]:
    """Collect garbage, then time one call, or a few calls if they are short."""
    gc.collect()
    times: list[float] = []
    while not times or (len(times) < CALLS and sum(times) < TURN):
        times.append(clock(step))
    return times


def interleave(
    steps: Mapping[str, Step],
    limit: Step | Mapping[str, Step],
    *,
    rounds: int,
    clock: Timer = wall_time,
    notify: Notify = lambda text: None,
) -> dict[str, Turns]:
    """Time contestants in rounds of one turn each. A contestant that raises drops out and its failure is recorded.

    There is one limit for all, or one for each contestant. Contestants with the same limit share its turns, so that
    each is compared with the best of them.
    """
    limit_of = {name: limit[name] if isinstance(limit, Mapping) else limit for name in steps}
    shared: dict[int, list[float]] = {id(one): [] for one in limit_of.values()}
    found = {name: Turns(limits=shared[id(one)]) for name, one in limit_of.items()}
    for one in {id(one): one for one in limit_of.values()}.values():
        one()  # the first call pays for threads and page faults
    for number in range(1, rounds + 1):
        for name, step in steps.items():
            turns = found[name]
            if turns.failure:
                continue
            notify(f"{name}, round {number} of {rounds}")
            turns.limits += turn(limit_of[name], clock)
            try:
                turns.steps += turn(step, clock)
            except Exception as error:
                turns.failure = describe(error)
    return found


def describe(error: BaseException) -> str:
    """Return an exception as the status of a row."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"not installed ({text[:100]})"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return "out of memory"
    return f"failed: {type(error).__name__}: {text[:150]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what packages print and warn about while they are imported, compiled and run."""
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield
