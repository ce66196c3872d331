"""The examination behind `contratile doctor`: what is here, whether it computes right, how long it takes.

    found = examine([torch.device("cpu")], quick=True)
    found.problems  # what is wrong; empty if all is well
    found.advice  # what could be better

Right means: values and gradients are off from the dense formula in fp64 by no more than three times what the formula
itself is off in the dtype that is computed in, fp32 or fp64, and a few roundings.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contratile import reference
from contratile.bench.harness import Notify, environment
from contratile.engine.backends import Backend, registry
from contratile.losses import functional
from contratile.packages import CHECKED, ESSENTIAL, QUICK, BrokenPackage, broken_packages

SCALE = 10.0
ROUNDS = 3
BACKENDS: tuple[Backend, ...] = ("dense", "torch", "triton")
REPORT = "Please report it with the output of `contratile doctor --json`; until then pass backend='torch'."

Case = Callable[..., Tensor]
LOSSES: dict[str, Case] = {
    "clip_loss": lambda of, q, k, s, **how: of.clip_loss(q, k, s, **how),
    "info_nce": lambda of, q, k, s, **how: of.info_nce(q[::2], k, s, labels=_labels(q[::2]) * 2, **how),
    "nt_xent": lambda of, q, k, s, **how: of.nt_xent(q, k, 1 / s, **how),
    "sup_con": lambda of, q, k, s, **how: of.sup_con(torch.cat([q, k]), _labels(q).repeat(2) % 7, 1 / s, **how),
    "siglip_loss": lambda of, q, k, s, **how: of.siglip_loss(q, k, s, -5.0, **how),
}
"""Of the losses in `functional` or in `reference`, on queries, keys and scale."""


def _labels(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


@dataclass(frozen=True)
class State:
    """Whether a backend can be used on a device."""

    device: str
    backend: str
    works: bool
    reason: str
    """Why not."""


@dataclass(frozen=True)
class Accuracy:
    """Errors relative to the largest entry: of the loss, and of the gradient that is off the most."""

    device: str
    backend: str
    loss: str
    dtype: str
    value_error: float
    value_allowed: float
    grad_error: float
    grad_allowed: float
    ok: bool
    note: str = ""
    """What was raised, if something was."""


@dataclass(frozen=True)
class Timing:
    """A step, forward and backward of `clip_loss`; the best of some rounds."""

    device: str
    backend: str
    n: int
    d: int
    dtype: str
    seconds: float | None
    note: str = ""


@dataclass
class Findings:
    """All that was found."""

    environment: dict[str, str]
    devices: list[str] = field(default_factory=list)
    backends: list[State] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    timing: list[Timing] = field(default_factory=list)
    packages: list[BrokenPackage] = field(default_factory=list)
    """Installed, but they cannot be imported."""

    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def all_devices() -> list[torch.device]:
    """The CPU, and the accelerators that torch sees."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    return found


def examine(devices: Sequence[torch.device], *, quick: bool = False, notify: Notify = lambda text: None) -> Findings:
    """Look at everything on each of the devices."""
    found = Findings(environment(("triton",)), devices=[_described(device) for device in all_devices()])
    notify("packages")
    found.packages = broken_packages(QUICK if quick else CHECKED)
    for package in found.packages:
        (found.problems if package.name in ESSENTIAL else found.advice).append(str(package))
    for device in devices:
        usable = []
        for backend in BACKENDS:
            notify(f"{device}: {backend}")
            state = state_of(device, backend)
            found.backends.append(state)
            if state.works:
                usable.append(backend)
            elif backend != "triton":
                found.problems.append(f"{device}: backend {backend!r} fails: {state.reason}. {REPORT}")
            elif device.type == "cuda":
                found.advice.append(f"{device}: kernels are not used, which costs time: {state.reason}")
        for backend in usable:
            for dtype in _dtypes(device, backend, quick):
                for loss in LOSSES:
                    notify(f"{device}: accuracy of {loss}, {backend}, {_name(dtype)}")
                    found.accuracy.append(accuracy(device, backend, loss, dtype))
        notify(f"{device}: timing")
        found.timing += timings(device, usable, quick)
    for wrong in (row for row in found.accuracy if not row.ok):
        what = wrong.note or (
            f"error {wrong.value_error:.1e} of the loss ({wrong.value_allowed:.1e} allowed) and "
            f"{wrong.grad_error:.1e} of a gradient ({wrong.grad_allowed:.1e} allowed)"
        )
        found.problems.append(f"{wrong.device}: {wrong.loss}, {wrong.backend}, {wrong.dtype}: {what}. {REPORT}")
    if len(found.devices) == 1:
        found.advice.append(
            "no GPU was found: losses run on the CPU, by backend='torch'. If there is one, check that torch was "
            "installed for it and that torch.accelerator.is_available() is true."
        )
    return found


def state_of(device: torch.device, backend: Backend) -> State:
    """Try it."""
    reason = registry.unavailable(device) if backend == "triton" else None
    if reason is not None:
        return State(str(device), backend, False, reason)
    q, k, s = (x.requires_grad_() for x in features(8, 8, torch.float32, device))
    try:
        functional.clip_loss(q, k, s, group=None, backend=backend).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever it is, it is what a user would meet
        return State(str(device), backend, False, _raised(error))
    return State(str(device), backend, True, "")


def accuracy(device: torch.device, backend: str, loss: str, dtype: torch.dtype) -> Accuracy:
    """Compare with fp64, and with how far the dense formula is from it."""
    inputs = features(97, 40, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = _outcome(loss, reference, [x.cpu().double() for x in inputs])
    naive = _errors(_outcome(loss, reference, [x.to(wide) for x in inputs]), exact)
    noise = 8 * torch.finfo(wide).eps * (1 + SCALE)
    rounding = 0.0 if dtype == wide else 2 * torch.finfo(dtype).eps  # of a gradient, and of the factors it is made from
    allowed = 3 * naive[0] + noise, 3 * naive[1] + noise + rounding
    key = str(device), backend, loss, _name(dtype)
    try:
        errors = _errors(_outcome(loss, functional, inputs, group=None, backend=backend), exact)
    except Exception as error:  # as above
        return Accuracy(*key, float("nan"), allowed[0], float("nan"), allowed[1], ok=False, note=_raised(error))
    ok = all(error <= limit for error, limit in zip(errors, allowed, strict=True))
    return Accuracy(*key, errors[0], allowed[0], errors[1], allowed[1], ok)


def features(n: int, d: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries, keys that resemble them, and the scale."""
    source = torch.Generator().manual_seed(n + d)
    q = torch.randn(n, d, generator=source)
    k = q + torch.randn(n, d, generator=source)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (torch.nn.functional.normalize(x).to(device, dtype) for x in (q, k))
    return [q, k, torch.tensor(SCALE, dtype=wide, device=device)]


def _outcome(loss: str, of: Any, inputs: Sequence[Tensor], **how: Any) -> list[Tensor]:
    """The loss and its gradients, in fp64 on the CPU."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = LOSSES[loss](of, *leaves, **how)
    grads = torch.autograd.grad(value, leaves)
    return [x.detach().cpu().double() for x in (value, *grads)]


def _errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Of the value, and the largest of the gradients. NaN is infinitely wrong."""
    errors = [
        float(((a - b).abs().max() / b.abs().max()).nan_to_num(nan=float("inf")))
        for a, b in zip(got, exact, strict=True)
    ]
    return errors[0], max(errors[1:])


def timings(device: torch.device, backends: Sequence[Backend], quick: bool) -> list[Timing]:
    """Backends take turns."""
    if device.type == "cpu":
        (n, d), dtype = ((1024, 128) if quick else (4096, 256)), torch.float32
    else:
        (n, d), dtype = ((4096, 512) if quick else (16384, 512)), torch.bfloat16
    inputs = [x.requires_grad_() for x in features(n, d, dtype, device)]
    best: dict[str, float] = {}
    notes: dict[str, str] = {}
    for backend in backends:
        if backend == "triton" and device.type == "cpu":
            notes[backend] = "interpreted, which tells nothing about time"
    for _ in range(ROUNDS):
        for backend in (name for name in backends if name not in notes):
            try:
                taken = _seconds(device, backend, inputs)
            except Exception as error:  # out of memory is a finding too
                notes[backend] = _raised(error)
                continue
            best[backend] = min(taken, best.get(backend, taken))
    return [
        Timing(str(device), backend, n, d, _name(dtype), best.get(backend), notes.get(backend, ""))
        for backend in backends
    ]


def _seconds(device: torch.device, backend: Backend, inputs: Sequence[Tensor]) -> float:
    synchronize = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    torch.autograd.grad(functional.clip_loss(*inputs, group=None, backend=backend), inputs)
    synchronize()
    return time.perf_counter() - start


def _dtypes(device: torch.device, backend: str, quick: bool) -> list[torch.dtype]:
    if backend == "triton":
        # Triton's own interpreter takes the bits of bf16 for whole numbers.
        half = torch.float16 if device.type == "cpu" else torch.bfloat16
        return [torch.float32, half] if quick or device.type == "cpu" else [torch.float32, half, torch.float16]
    # The dense backend computes in the features' dtype, and promises nothing for those of 16 bit.
    halves = [] if backend == "dense" else [torch.bfloat16] if quick else [torch.bfloat16, torch.float16]
    return [torch.float32, *halves, *([] if quick or device.type == "mps" else [torch.float64])]


def _described(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu: {environment()['cpu']}, {torch.get_num_threads()} threads"
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    kind = getattr(properties, "gcnArchName", "") if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return f"{device}: {properties.name}, {kind}, {properties.total_memory / 2**30:.0f} GiB"


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(".")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
