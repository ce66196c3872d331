"""`contratile.plan`: predicts what a training run needs, before it starts.

    found = plan("open_clip:ViT-L-14", batch=65536, devices="8xA800-80G", precision="bf16")
    print(found)

`Plan` is data; tables, pictures and recipes are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from contratile.errors import bad_value, check_choice, check_count
from contratile.grad_cache.chunks import Nest
from contratile.grad_cache.offload import OFFLOADS
from contratile.models.towers import TowerConfig, Towers
from contratile.planner.calibration import Calibration
from contratile.planner.calibration import calibrate as run_chunks
from contratile.planner.devices import Devices, parse_devices
from contratile.planner.encoder_cost import DTYPES, EncoderCost, EncoderPrecision, encoder_cost
from contratile.planner.memory import Memory, device_memory, disk_memory, host_memory
from contratile.planner.search import Change, LargestBatch, best_chunk, fits, largest_batches, smallest_change
from contratile.planner.step_seconds import StepSeconds, step_seconds
from contratile.planner.tower_inputs import EncoderExample, encoder_sides, tower_definitions
from contratile.planner.workload import (
    LossFacts,
    MakeOptimizer,
    Offload,
    OptimizerCost,
    SecondCost,
    Workload,
    by_name,
    count_optimizer,
)

COUNTED = (16, 64)
"""Rows of the counted chunks if the plan chooses the chunk."""
FEW_STEPS = 1000
"""Fewer steps than this in a whole run are called too few. The shortest runs of the paper have several thousand."""

Notify = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory and time of a training run: a prediction."""

    model: str
    work: Workload
    devices: Devices
    memory: Memory
    """Memory of one device."""

    host: Memory
    """Host memory of a node."""

    disk: Memory
    """Disk space of a node."""

    largest: tuple[LargestBatch, ...]
    """The largest batch by method, with this chunk."""

    chunk_best: int
    """The smallest chunk that is as fast as any that fits."""

    time: StepSeconds
    samples_per_epoch: int = 0
    """0: unknown."""

    steps: int = 0
    """Steps of the whole run; 0: unknown."""

    change: Change | None = None
    """If the run does not fit: the smallest change that does."""

    calibration: Calibration | None = None
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.memory.fits and self.host.fits

    @property
    def steps_per_epoch(self) -> int | None:
        return max(1, self.samples_per_epoch // self.work.batch) if self.samples_per_epoch else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        found: dict[str, Any] = _plain(asdict(self))
        for name in ("memory", "host", "disk"):
            kind: Memory = getattr(self, name)
            found[name] |= {"peak": _plain(kind.peak), "phase": kind.phase, "left": _plain(kind.left)}
        found |= {"fits": self.fits, "steps_per_epoch": self.steps_per_epoch}
        found["time"] |= {"seconds": self.time.seconds, "samples_per_second": self.time.samples_per_second}
        for name in ("gpu", "cpu"):
            found["devices"].pop(name)
        return found

    def __str__(self) -> str:
        from contratile.planner.plan_text import text

        return text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan(
    model: str | TowerConfig | nn.Module | Sequence[nn.Module],
    *,
    batch: int,
    devices: str | Devices = "cpu",
    chunk: int | Literal["auto"] = "auto",
    sample_inputs: Sequence[Nest] | None = None,
    tokens: int = 0,
    precision: EncoderPrecision = "fp32",
    fsdp: bool = False,
    offload: Offload = "none",
    optimizer: str | MakeOptimizer = "adamw",
    optimizer_name: str = "",
    loss: LossFacts | None = None,
    samples_per_epoch: int = 0,
    steps: int = 0,
    epochs: float = 0.0,
    calibrate: bool = False,
    host_bytes: float = 0.0,
    kept: tuple[bool, bool] = (False, False),
    second: tuple[str, tuple[EncoderExample, EncoderExample]] | None = None,
    name: str = "",
    notify: Notify = lambda text: None,
) -> Plan:
    """Predict memory and time of a training run with gradient caching, before it starts.

    No weights are loaded: encoders run on fake tensors, which have shapes and lifetimes but no memory.

    Args:
        model: Towers as in training ("tiny", "open_clip:ViT-L-14", "hf:...", "st:...") or their `TowerConfig`; or an
            encoder for both sides, or one for each, as `GradCache` takes them.
        batch: Pairs in a step, over all devices.
        devices: "8xA800-80G", "4x8xH100" (4 nodes of 8), "cpu" (this machine), or `planner.Devices`.
        chunk: Pairs that go through the encoders at a time; "auto": the best that fits.
        sample_inputs: For modules: an example input of each encoder, of any number of rows; only shapes are used.
        tokens: For towers: tokens of a text; 0: as many as the model takes.
        precision: Precision of the encoders.
        fsdp: Shard weights, gradients and optimiser state over the devices.
        offload: Where inputs wait for their second pass.
        optimizer: A class of torch.optim, case ignored, or a function that makes one for a module.
        optimizer_name: What the plan calls the optimiser.
        loss: Views, hard negatives and score cache of the loss; by default that of CLIP.
        samples_per_epoch: Pairs of an epoch, for the number of steps; 0: unknown.
        steps: Steps of the run; 0: from `epochs`.
        epochs: Passes over the data.
        calibrate: Run two small chunks on this machine, and correct activations and seconds by what they take.
        host_bytes: Host memory that each process keeps throughout.
        kept: Towers whose locked backbones are computed once, by side.
        second: A frozen model that encodes each batch too: what the plan calls it ("guide", "teacher"), and its
            encoders with inputs, from `planner.tower_inputs.encoder_sides`.
        name: What the plan calls the model.
        notify: Called with a line about progress.

    Returns:
        The plan; printing it shows tables.

    Raises:
        ValueError: An option has an invalid value, or the model cannot run on fake tensors.

    Examples:
        >>> import torch, contratile as ct
        >>> encoder = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))
        >>> found = ct.plan(encoder, sample_inputs=[torch.zeros(1, 64)], batch=4096, devices="8xA800-80G")
        >>> found.fits, found.memory.phase in ("loss", "backward")
        (True, True)
    """
    check_count("batch", batch, least=1)
    check_choice("precision", precision, tuple(DTYPES))
    check_choice("offload", offload, OFFLOADS)
    if chunk != "auto":
        check_count("chunk", chunk, least=1)
    where = parse_devices(devices) if isinstance(devices, str) else devices
    sides, title = _sides(model, sample_inputs, tokens, kept, notify)
    share = -(-batch // where.count)
    counted = COUNTED if chunk == "auto" else (max(1, min(chunk, share) // 2), min(chunk, share))
    costs = _costs(sides, counted, precision, where, notify)
    also = None if second is None else _second(*second, counted, precision, where, notify)
    notify("counting the optimiser")
    modules = [side.module for side in sides]
    work = Workload(
        batch=batch,
        chunk=share if chunk == "auto" else min(chunk, share),
        ranks=where.count,
        precision=precision,
        fsdp=fsdp and where.count > 1,
        offload=offload,
        sides=(costs[0], costs[1]),
        second=also,
        loss=loss or LossFacts(),
        optimizer=_optimizer(modules, optimizer, optimizer_name, where),
        host_bytes=host_bytes,
    )
    if sides[0].module is sides[1].module and costs[0] is not costs[1]:
        work = _shared_weights(work)
    found = _calibrate(sides, work, where, notify) if calibrate else None
    if found is not None:
        work = replace(work, measured=found.memory)
    best = best_chunk(work, where)
    if chunk == "auto":
        work = replace(work, chunk=best)
    return assemble(
        work,
        where,
        model=name or title,
        chunk_best=best,
        samples_per_epoch=samples_per_epoch,
        steps=steps or (math.ceil(epochs * samples_per_epoch / batch) if epochs and samples_per_epoch else 0),
        calibration=found,
    )


def _optimizer(
    modules: Sequence[nn.Module], optimizer: str | MakeOptimizer, name: str, where: Devices
) -> OptimizerCost:
    """Count an update of an optimiser, given by name or as a function."""
    if not isinstance(optimizer, str):
        return count_optimizer(modules, optimizer, name or "optimiser", where.clock("fp32"))
    if optimizer.lower() not in {x.lower() for x in dir(torch.optim)}:
        bad_value("optimizer", expected="a class of torch.optim", got=repr(optimizer), remedy="Or pass a function.")
    return count_optimizer(modules, by_name(optimizer), name or optimizer, where.clock("fp32"))


def assemble(
    work: Workload,
    devices: Devices,
    *,
    model: str,
    chunk_best: int,
    samples_per_epoch: int = 0,
    steps: int = 0,
    calibration: Calibration | None = None,
) -> Plan:
    """A plan from its counted parts."""
    time = step_seconds(work, devices)
    if calibration is not None:
        time = calibration.corrected_time(time)
    warnings = []
    if steps and steps < FEW_STEPS:
        warnings.append(
            f"{steps:,} steps in the whole run are few: a batch of {work.batch:,} leaves little to train with. Lower "
            f"--batch, or train longer ({FEW_STEPS:,} steps or more are usual)."
        )
    ok = fits(work, devices)
    return Plan(
        model=model,
        work=work,
        devices=devices,
        memory=device_memory(work, devices),
        host=host_memory(work, devices),
        disk=disk_memory(work, devices),
        largest=largest_batches(work, devices),
        chunk_best=chunk_best,
        time=time,
        samples_per_epoch=samples_per_epoch,
        steps=steps,
        change=None if ok else smallest_change(work, devices),
        calibration=calibration,
        warnings=tuple(warnings),
        assumptions=(
            *devices.sources,
            *_of_loss(work, devices),
            "encoders: every operator counted on fake tensors; scratch memory inside operators is not seen",
            "not counted: reading data, evaluation, Python and libraries in host memory",
        ),
    )


def _of_loss(work: Workload, devices: Devices) -> Sequence[str]:
    """Notes about what the time of the loss leaves out."""
    if devices.on_cpu or not work.loss.prefixes:
        return ()
    return ("Matryoshka: as if kernels covered it; it runs on the torch backend, which reads and writes every tile",)


def _sides(
    model: str | TowerConfig | nn.Module | Sequence[nn.Module],
    inputs: Sequence[Nest] | None,
    tokens: int,
    kept: tuple[bool, bool],
    notify: Notify,
) -> tuple[tuple[EncoderExample, EncoderExample], str]:
    if isinstance(model, str):
        model = TowerConfig(towers=model)
    if isinstance(model, TowerConfig):
        notify(f"building {model.towers} without weights")
        title, model = model.towers, tower_definitions(model)
    else:
        title = type(model).__name__
    if isinstance(model, Towers):
        real = None if inputs is None else (inputs[0], inputs[-1])
        return encoder_sides(model, tokens=tokens, inputs=real, kept=kept), title
    if inputs is None:
        remedy = "Pass sample_inputs=[images, tokens], with any number of rows."
        bad_value("sample_inputs", expected="an example input of each encoder", got=None, remedy=remedy)
    modules = [model] if isinstance(model, nn.Module) else list(model)
    if not 1 <= len(modules) <= 2 or not 1 <= len(inputs) <= 2:
        got = f"{len(modules)} modules and {len(inputs)} inputs"
        bad_value("model", expected="one encoder, or two", got=got, remedy="Hard negatives are an option of the loss.")
    title = " + ".join(type(module).__name__ for module in modules)
    return (EncoderExample(modules[0], inputs[0]), EncoderExample(modules[-1], inputs[-1])), title


def _costs(
    sides: tuple[EncoderExample, EncoderExample],
    rows: tuple[int, int],
    precision: EncoderPrecision,
    devices: Devices,
    notify: Notify,
) -> list[EncoderCost]:
    """Count both encoders; once, if they are the same with inputs of the same shapes."""
    left, right = sides

    def count(side: EncoderExample, name: str) -> EncoderCost:
        return encoder_cost(
            side.module,
            side.inputs,
            rows=rows,
            precision=precision,
            on_cpu=devices.on_cpu,
            clock=devices.clock(precision),
            notify=lambda text: notify(f"{name} encoder: {text}"),
        )

    first = count(left, "left")
    shared = right.module is left.module and _same(left.inputs, right.inputs)
    return [first, first if shared else count(right, "right")]


def _second(
    role: str,
    sides: tuple[EncoderExample, EncoderExample],
    rows: tuple[int, int],
    precision: EncoderPrecision,
    devices: Devices,
    notify: Notify,
) -> SecondCost:
    left, right = _costs(sides, rows, precision, devices, lambda text: notify(f"{role}: {text}"))
    if sides[0].module is sides[1].module and left is not right:
        right = replace(right, weight_bytes=0)
    return SecondCost(role=role, sides=(left, right))


def _same(left: Nest, right: Nest) -> bool:
    from contratile.grad_cache.chunks import tensors_of

    both = [[(x.shape[1:], x.dtype) for x in tensors_of(nest)] for nest in (left, right)]
    return both[0] == both[1]


def _shared_weights(work: Workload) -> Workload:
    """One encoder with inputs of two shapes: its weights count once."""
    left, right = work.sides
    return replace(work, sides=(left, replace(right, weight_bytes=0, trained_bytes=0)))


def _calibrate(
    sides: tuple[EncoderExample, EncoderExample], work: Workload, devices: Devices, notify: Notify
) -> Calibration:
    if not devices.on_cpu:
        remedy = "Run the plan with --devices cpu, or on the machine itself without --calibrate."
        bad_value("calibrate", expected="this machine as the device", got=devices.name, remedy=remedy)
    return run_chunks(sides, work, devices, notify)
