"""The examination behind `contratile doctor`: devices, packages, backends, accuracy and a short timing.

found = examine([torch.device("cpu")], quick=True)
found.problems  # what is wrong; empty on a healthy machine
found.advice  # what could be better
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from contratile.doctor.accuracy import Accuracy, check_accuracy, checked_dtypes, checked_losses
from contratile.doctor.inputs import dtype_name, error_text, unit_features
from contratile.doctor.timing import StepTime, time_steps
from contratile.engine.backends import Backend, registry
from contratile.losses import functional
from contratile.machine import GiB, cpu_name, environment
from contratile.packages import CHECKED, ESSENTIAL, QUICK, BrokenPackage, broken_packages

BACKENDS: tuple[Backend, ...] = ("dense", "torch", "triton")
REPORT = "Please report it with the output of `contratile doctor --json`; until then pass backend='torch'."
NO_GPU = (
    "no GPU was found: losses run on the CPU with backend='torch'. If there is one, check that torch was "
    "installed for it and that torch.accelerator.is_available() is true."
)
Notify = Callable[[str], None]


@dataclass(frozen=True)
class BackendState:
    """Whether a backend can be used on a device."""

    device: str
    backend: str
    works: bool
    reason: str
    """Why not, if it does not work."""


@dataclass
class Findings:
    """Everything that was found."""

    environment: dict[str, str]
    devices: list[str] = field(default_factory=list)
    backends: list[BackendState] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    timing: list[StepTime] = field(default_factory=list)
    packages: list[BrokenPackage] = field(default_factory=list)
    """Packages that are installed but cannot be imported."""

    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def all_devices() -> list[torch.device]:
    """Return the CPU and every accelerator that torch sees."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    return found


def examine(devices: Sequence[torch.device], *, quick: bool = False, notify: Notify = lambda text: None) -> Findings:
    """Check packages, then backends, accuracy and time on each device.

    Args:
        devices: The devices to check.
        quick: Fewer dtypes and packages, smaller sizes.
        notify: Called with a line of text before each check.

    Returns:
        The findings; `problems` is empty if everything works.
    """
    found = Findings(environment(("triton",)), devices=[_described(device) for device in all_devices()])
    notify("packages")
    found.packages = broken_packages(QUICK if quick else CHECKED)
    for package in found.packages:
        (found.problems if package.name in ESSENTIAL else found.advice).append(str(package))
    for device in devices:
        usable = _check_backends(device, found, notify)
        for backend in usable:
            for dtype in checked_dtypes(device, backend, quick):
                for loss in checked_losses(backend):
                    notify(f"{device}: accuracy of {loss}, {backend}, {dtype_name(dtype)}")
                    found.accuracy.append(check_accuracy(device, backend, loss, dtype))
        notify(f"{device}: timing")
        found.timing += time_steps(device, usable, quick)
    found.problems += [f"{check}. {REPORT}" for check in found.accuracy if not check.ok]
    if len(found.devices) == 1:
        found.advice.append(NO_GPU)
    return found


def _check_backends(device: torch.device, found: Findings, notify: Notify) -> list[Backend]:
    """Record the state of every backend on a device and return those that work."""
    usable: list[Backend] = []
    for backend in BACKENDS:
        notify(f"{device}: {backend}")
        state = check_backend(device, backend)
        found.backends.append(state)
        if state.works:
            usable.append(backend)
        elif backend != "triton":
            found.problems.append(f"{device}: backend {backend!r} fails: {state.reason}. {REPORT}")
        elif device.type == "cuda":
            found.advice.append(f"{device}: Triton kernels are not used, which costs time: {state.reason}")
    return usable


def check_backend(device: torch.device, backend: Backend) -> BackendState:
    """Run a tiny loss, forward and backward."""
    reason = registry.unavailable(device) if backend == "triton" else None
    if reason is not None:
        return BackendState(str(device), backend, False, reason)
    q, k, s = (x.requires_grad_() for x in unit_features(8, 8, torch.float32, device))
    try:
        functional.clip_loss(q, k, s, group=None, backend=backend).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a user would run into
        return BackendState(str(device), backend, False, error_text(error))
    return BackendState(str(device), backend, True, "")


def _described(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu: {cpu_name()}, {torch.get_num_threads()} threads"
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    kind = getattr(properties, "gcnArchName", "") if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return f"{device}: {properties.name}, {kind}, {properties.total_memory / GiB:.0f} GiB"
