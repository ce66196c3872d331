"""Connect the processes of a run, whether started by torchrun, accelerate, MPI or alone.

    accelerator = join(config.run)           # on every process, before anything is written

Without an accelerator the run uses the CPU and gloo. A process that was started as one of several but does not find the
others is refused: it would train alone and overwrite their files.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from contratile.errors import bad_value
from contratile.train.sharding import FROM_ACCELERATE

if TYPE_CHECKING:
    from contratile.train.config import RunConfig

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables in which launchers pass the number of processes."""


def join(run: RunConfig) -> Any:
    """Connect this process with the others.

    Args:
        run: Options of the run; `cpu`, `precision` and `timeout` are used.

    Returns:
        The `Accelerator`.

    Raises:
        ValueError: The launcher started more processes than find each other, or the options do not fit the device.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import InitProcessGroupKwargs, patch_environment

    on_cpu = run.cpu or not torch.accelerator.is_available()
    if run.precision == "fp16" and on_cpu:
        remedy = "fp16 needs an accelerator; bf16 has the range of fp32."
        bad_value("precision", expected="fp32 or bf16 on a CPU", got="fp16", remedy=remedy)
    started = processes_started()
    precision = "no" if run.precision == "fp32" else run.precision
    wait = InitProcessGroupKwargs(timeout=timedelta(seconds=run.timeout))
    with patch_environment(**{FROM_ACCELERATE: "false"}):  # FSDP is handled by sharding.py
        AcceleratorState._reset_state()  # an earlier run in this process may have used another precision
        if not dist.is_initialized():
            PartialState._reset_state()  # or have run alone
        accelerator = Accelerator(mixed_precision=precision, cpu=on_cpu, kwargs_handlers=[wait])
    if accelerator.num_processes != started:
        remedy = "Pass --cpu to train on CPUs, or start it with torchrun, which gives every process its rank."
        got = f"{accelerator.num_processes} on {accelerator.device}"
        bad_value("processes", expected=f"the {started} that the launcher started", got=got, remedy=remedy)
    return accelerator


def processes_started() -> int:
    """The number of processes, from the process group if there is one, else from the launcher's environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value:
            if not (value.isascii() and value.isdigit() and int(value)):
                bad_value(name, expected="a number of processes", got=repr(value), remedy=f"Unset {name}.")
            return int(value)
    return 1


def gather_objects(mine: Any) -> list[Any]:
    """The objects of all processes, in the order of ranks. Collective."""
    from accelerate.utils import gather_object

    return list(gather_object([mine]))
