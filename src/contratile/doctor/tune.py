"""Which tiles and launch configurations are fastest here? `contratile doctor --tune` measures and keeps the winners.

    for found in tune(subjects(torch.device("cpu"), TuneOptions())):
        found.trials, found.kept

A subject is one thing to tune: the tiles of the torch backend on a CPU, or a kernel on a GPU, for one dtype and D.
Every candidate is compared with fp64 before it is timed. The default stays unless another one is faster by more than
the noise.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, get_args

import torch

from contratile.bench.clock import Step, clock_for
from contratile.bench.harness import Notify, turn
from contratile.doctor.accuracy import LOSSES, Accuracy, check_accuracy
from contratile.doctor.inputs import error_text, unit_features
from contratile.engine import tuned
from contratile.engine.backends import registry
from contratile.engine.plan import plan_tiles
from contratile.engine.stats import accumulation_dtype
from contratile.engine.tuned import Choice
from contratile.errors import bad_value
from contratile.losses import functional

KernelName = Literal["forward", "gradient"]

LEAST_GAIN = 0.03
"""A candidate replaces the default if it is faster by more than this, and by more than the noise."""
BUSY = 0.1
"""With more noise than this, a result in favour of the default does not discard an earlier choice."""
DEFAULT, AGAIN = "default", "default, again"
"""The default is timed twice, to see the noise."""

DTYPES: dict[str, tuple[torch.dtype, str | None]] = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "tf32": (torch.float32, "tf32"),
    "float32": (torch.float32, "ieee"),
    "float64": (torch.float64, None),
}
"""Dtypes of features, and how fp32 features are multiplied."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune for; None means the default of the device."""

    size: int | None = None
    dims: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    quick: bool = False


@dataclass(frozen=True)
class CandidateResult:
    """One candidate."""

    candidate: str
    seconds: float | None
    ratio: float | None
    """Time over that of the default: below 1 is faster."""

    note: str = ""
    """Why there is no time, if there is none."""


@dataclass(frozen=True)
class Tuning:
    """What was found for one subject."""

    kind: str
    device: str
    dtype: str
    n: int
    d: int
    trials: list[CandidateResult]
    kept: str
    noise: float
    """How much times of the default differ, at least `LEAST_GAIN`."""

    timed: bool
    """False if kernels are interpreted or the default does not run; then nothing was recorded either."""

    wrong: list[str] = field(default_factory=list)
    """Candidates whose results differ from fp64."""


class Subject(ABC):
    """One thing to tune."""

    kind: str
    """The kind of entry in `engine.tuned`."""

    device: torch.device
    name: str
    """Name of the device, as it is recorded."""

    dtype: str
    n: int
    d: int
    rounds = 5
    timed = True
    """Whether times mean anything."""

    losses: tuple[str, ...] = tuple(LOSSES)
    """What the winner is checked with."""

    @abstractmethod
    def candidates(self) -> dict[str, Choice | None]:
        """Return the candidates by name, the default first."""

    @abstractmethod
    def step(self, choice: Choice | None) -> Step:
        """Return the step to time."""

    @abstractmethod
    def check(self, choice: Choice | None, loss: str) -> Accuracy:
        """Compare a loss with fp64."""


class CpuTiles(Subject):
    """Tiles of the torch backend on this CPU."""

    kind, device, rounds = tuned.TILES, torch.device("cpu"), 4
    losses = ("clip_loss", "info_nce", "siglip_loss")  # one set keeps the rule's tiles
    EDGE = 2048
    """Largest tiles that are checked whole: the fp64 oracle is dense."""

    def __init__(self, n: int, d: int, dtype: torch.dtype) -> None:
        self.n, self.d, self.torch_dtype = n, d, dtype
        self.itemsize = accumulation_dtype(dtype).itemsize
        self.dtype, self.name = tuned.accumulated(self.itemsize), tuned.cpu()
        self.inputs = [x.requires_grad_() for x in unit_features(n, d, dtype, self.device)]

    def candidates(self) -> dict[str, Choice | None]:
        """Shapes around that of the rule, each as large as the workspace allows."""
        rule = plan_tiles(self.n, self.n, self.d, itemsize=self.itemsize)
        shapes: dict[tuple[int, int], None] = {}
        for high, wide in ((1, 0.5), (0.5, 1), (0.5, 0.5), (2, 0.5), (0.5, 2)):
            shape = tuple(max(64, int(x) // 16 * 16) for x in (rule.rows * high, rule.cols * wide))
            made = plan_tiles(self.n, self.n, self.d, itemsize=self.itemsize, shape=(shape[0], shape[1]))
            shapes[made.rows, made.cols] = None
        shapes.pop((rule.rows, rule.cols), None)
        return {DEFAULT: None} | {f"{rows} x {cols}": (rows, cols) for rows, cols in shapes}

    def step(self, choice: Choice | None) -> Step:
        def step() -> None:
            with tuned.forced(tuned.TILES, choice or self._rule()):
                torch.autograd.grad(functional.clip_loss(*self.inputs, group=None, backend="torch"), self.inputs)

        return step

    def _rule(self) -> Choice:
        """The tiles of the rule, whatever the file of tuned ones says."""
        rule = plan_tiles(self.n, self.n, self.d, itemsize=self.itemsize)
        return rule.rows, rule.cols

    def check(self, choice: Choice | None, loss: str) -> Accuracy:
        n = min(self.EDGE, self.n) + 97  # the same for all candidates, which share the oracle
        with tuned.forced(tuned.TILES, choice or self._rule()):
            return check_accuracy(self.device, "torch", loss, self.torch_dtype, n=n, d=min(self.d, 64))


class Kernel(Subject):
    """A launch configuration of a kernel, "forward" or "gradient"."""

    def __init__(
        self, kernel: KernelName, device: torch.device, n: int, d: int, dtype: torch.dtype, precision: str | None
    ) -> None:
        from contratile.engine.backends import triton_launch
        from contratile.engine.backends.triton_configs import kind_of

        self.kind, self.device, self.n, self.d = kernel, device, n, d
        self.kernel = kernel
        self.torch_dtype, self.precision = dtype, precision
        self.arch = triton_launch.Device.of(device).arch
        self.dtype = kind_of(self.arch, dtype, precision or "ieee")
        self.name, self.timed = triton_launch.device_name(device), not triton_launch.INTERPRETED
        self.rounds = 5 if self.timed else 1
        self.how: Any = {"group": None, "backend": "triton", "precision": precision}
        self.inputs = [x.requires_grad_() for x in unit_features(n, d, dtype, device)]

    def candidates(self) -> dict[str, Choice | None]:
        from contratile.engine.backends.triton_configs import candidates, config_for

        found: dict[Choice, Choice] = {}
        for config in candidates(self.arch, self.dtype, self.kernel):
            found.setdefault(config_for(self.arch, self.d, self.dtype, kernel=self.kernel, chosen=config), config)
        names = ["{} x {} x {}, {} warps, {} stages, {} registers".format(*shown) for shown in found]
        return dict(zip([DEFAULT, *names[1:]], found.values(), strict=True))

    def step(self, choice: Choice | None) -> Step:
        def forward() -> None:
            with tuned.forced("forward", choice), torch.no_grad():
                functional.clip_loss(*self.inputs, **self.how)

        if self.kind == "forward":
            return forward
        value = functional.clip_loss(*self.inputs, **self.how)

        def backward() -> None:
            with tuned.forced("gradient", choice):
                torch.autograd.grad(value, self.inputs, retain_graph=True)

        return backward

    def check(self, choice: Choice | None, loss: str) -> Accuracy:
        sizes = {"n": 293, "d": self.d} if self.timed else {"n": 37, "d": min(self.d, 24)}
        with tuned.forced(self.kind, choice):
            return check_accuracy(self.device, "triton", loss, self.torch_dtype, precision=self.precision, **sizes)


def subjects(device: torch.device, options: TuneOptions) -> list[Subject]:
    """Return what can be tuned on a device.

    Raises:
        ValueError: If nothing can.
    """
    reason = registry.unavailable(device)
    if device.type == "cpu" and reason is not None:  # kernels are not interpreted
        names = _names(options.dtypes or ("float32",), ("float32", "float64"), "16-bit features use float32's tiles.")
        dims = options.dims or ((128,) if options.quick else (128, 512, 768))
        size = options.size or (2048 if options.quick else 4096)
        return [CpuTiles(size, d, DTYPES[name][0]) for name in names for d in dims]
    if reason is not None:
        what = "Only kernels can be tuned on a GPU, and tiles of the torch backend on a CPU."
        bad_value("device", expected="a device that kernels run on, or the CPU", got=reason, remedy=what)
    interpreted = device.type == "cpu"
    on_gpu = ("bfloat16",) if options.quick else ("bfloat16", "tf32", "float32")
    usual = ("float32", "float16") if interpreted else on_gpu
    allowed = tuple(name for name in DTYPES if name != "float64" and not (interpreted and name == "bfloat16"))
    names = _names(options.dtypes or usual, allowed, "Other dtypes have no kernels here.")
    dims = options.dims or ((24,) if interpreted else (512,) if options.quick else (128, 512, 768))
    size = options.size or (40 if interpreted else 8192 if options.quick else 16384)
    made: dict[tuple[str, str, int], Subject] = {}
    for name in names:
        for d in dims:
            for kernel in get_args(KernelName):
                subject = Kernel(kernel, device, size, d, *DTYPES[name])
                made.setdefault((kernel, subject.dtype, d), subject)  # bfloat16 and float16 are one kind
    return list(made.values())


def _names(asked: Sequence[str], allowed: Sequence[str], remedy: str) -> Sequence[str]:
    for name in asked:
        if name not in allowed:
            bad_value("dtypes", expected=f"some of {', '.join(allowed)}", got=name, remedy=remedy)
    return asked


def tune(every: Iterable[Subject], *, notify: Notify = lambda text: None) -> Iterator[Tuning]:
    """Check and time the candidates of each subject, and record the winner where times mean something."""
    for subject in every:
        yield _tune(subject, notify)


def _tune(subject: Subject, tell: Notify) -> Tuning:
    def notify(text: str) -> None:
        tell(f"{subject.device}: {subject.kind}, {subject.dtype}, D={subject.d}: {text}")

    choices, notes, wrong = subject.candidates(), dict[str, str](), list[str]()
    steps: dict[str, Step] = {}
    for name, choice in choices.items():
        notify(f"checking {name}")
        seen = subject.check(choice, "clip_loss")
        try:
            if seen.ok:
                steps[name] = subject.step(choice)
                steps[name]()  # builds the kernel, starts threads
        except Exception as error:  # a candidate that cannot run is a result too
            notes[name] = error_text(error)
            steps.pop(name, None)
        if not seen.ok:
            notes[name] = seen.note or f"wrong: {seen}"
            wrong += [] if seen.note else [f"{subject.kind}, {name}: {seen}"]
    times = _timed(subject, steps, notify) if subject.timed and DEFAULT in steps else {}
    noise = _noise(times) if times else LEAST_GAIN
    winner = DEFAULT
    for name in _faster(times, noise) if times else []:
        notify(f"checking every loss with {name}")
        checks = [subject.check(choices[name], loss) for loss in subject.losses]
        wrong += [f"{subject.kind}, {name}: {check}" for check in checks if not check.ok]
        if all(check.ok for check in checks):
            winner = name
            break
    best = {name: min(found) for name, found in times.items()}
    if times and (winner != DEFAULT or noise <= BUSY):
        tuned.record(
            subject.kind,
            device=subject.name,
            dtype=subject.dtype,
            d=subject.d,
            choice=None if winner == DEFAULT else choices[winner],
            seconds=best[winner],
            default_seconds=best[DEFAULT],
        )
    untimed = "" if subject.timed else "right; not timed: Triton is interpreted"
    trials = [
        CandidateResult(
            name, best.get(name), best[name] / best[DEFAULT] if name in best else None, notes.get(name, untimed)
        )
        for name in (*choices, *([AGAIN] if best else []))
    ]
    where = subject.kind, subject.name, subject.dtype, subject.n, subject.d
    return Tuning(*where, trials, winner, noise, bool(best), wrong)


def _timed(subject: Subject, steps: dict[str, Step], notify: Notify) -> dict[str, list[float]]:
    """The times of each candidate. They take turns, and each round starts with another one."""
    clock, times = clock_for(subject.device).seconds, dict[str, list[float]]()
    order = [*steps.items(), (AGAIN, steps[DEFAULT])]
    for number in range(subject.rounds):
        start = number * len(order) // subject.rounds
        for name, step in order[start:] + order[:start]:
            notify(f"{name}, round {number + 1} of {subject.rounds}")
            times.setdefault(name, []).extend(turn(step, clock))
    return times


def _noise(times: dict[str, list[float]]) -> float:
    """Relative difference of the default's times: between the bests of its two entries, and between median and best."""
    default = times[DEFAULT] + times[AGAIN]
    return max(LEAST_GAIN, abs(min(times[AGAIN]) / min(times[DEFAULT]) - 1), median(default) / min(default) - 1)


def _faster(times: dict[str, list[float]], noise: float) -> list[str]:
    """Candidates that beat the default by more than the noise, in the median too, from the fastest."""
    default = times[DEFAULT] + times[AGAIN]
    best, middle = min(default) * (1 - noise), median(default) * (1 - LEAST_GAIN)
    found = [name for name, taken in times.items() if min(taken) < best and median(taken) < middle]
    return sorted(found, key=lambda name: min(times[name]))
