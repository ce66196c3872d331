"""How the processes of a run find each other, whoever started them: torchrun, accelerate, MPI or nobody.

    accelerator = join(config.run)           # on every process; refuses before anything is written

Without an accelerator the CPU is chosen and gloo connects the processes. A process that would believe itself alone
among several is refused: it would train on its own and write over the others' files.
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
"""Variables in which launchers tell how many processes they started."""


def join(run: RunConfig) -> Any:
    """accelerate's `Accelerator` of this process, connected with the others.

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
    with patch_environment(**{FROM_ACCELERATE: "false"}):  # FSDP is ours: see sharding.py
        AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
        if not dist.is_initialized():
            PartialState._reset_state()  # or have been alone
        accelerator = Accelerator(mixed_precision=precision, cpu=on_cpu, kwargs_handlers=[wait])
    if accelerator.num_processes != started:
        remedy = "Pass --cpu to train on CPUs, or start it with torchrun, which tells every process its number."
        got = f"{accelerator.num_processes} on {accelerator.device}"
        bad_value("processes", expected=f"the {started} that the launcher started", got=got, remedy=remedy)
    return accelerator


def processes_started() -> int:
    """How many processes there are, by the process group if there is one, else by what the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value:
            if not (value.isascii() and value.isdigit() and int(value)):
                bad_value(name, expected="a number of processes", got=repr(value), remedy=f"Unset {name}.")
            return int(value)
    return 1
