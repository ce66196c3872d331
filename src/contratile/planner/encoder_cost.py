"""What a chunk costs in an encoder: memory, flops and traffic of its passes, counted on fake tensors.

    cost = encoder_cost(module, inputs, rows=(32, 64))
    cost.at(256).peak                                        # bytes: forward and backward of 256 rows

The module may have real weights or none (built on the meta device): only shapes are used. Two numbers of rows are
counted; figures for others are linear in the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from contratile.errors import bad_value
from contratile.grad_cache.chunks import Nest, call, count_rows, map_tensors, tensors_of
from contratile.models.base import Pixels
from contratile.models.pretrained import first_line
from contratile.models.towers import LockedTowerHead, Tower
from contratile.planner.cpu_rates import OperatorClock
from contratile.planner.live_bytes import LiveBytes

EncoderPrecision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

HOLE_SHARE = 0.58
"""Memory that glibc's malloc does not reuse, as a share of the bytes that a recorded forward pass frees: a freed block
between two saved tensors is too small for an aligned block of the same size. Fitted on three runs that are not among
those of the benchmark (see docs/plan.md)."""


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Bytes and operations of one chunk in one encoder. Weights, gradients and inputs are not counted."""

    rows: int
    """Rows of the chunk."""

    encode_peak: float
    """Forward pass of the first chunk, which records a graph to see what is trained; others need less."""

    peak: float
    """Forward and backward pass."""

    unreused: float
    """Freed memory that a CPU's allocator still holds at that time."""

    forward_flops: float
    backward_flops: float
    forward_product_bytes: float
    backward_product_bytes: float
    """Read and written by products, convolutions and attention."""

    forward_moved: float
    backward_moved: float
    """Read and written by all other operators."""

    forward_operators: float
    backward_operators: float

    encode_seconds: float
    forward_seconds: float
    backward_seconds: float
    """Seconds of the forward pass without gradients, with them, and of the backward pass; 0 unless a clock is given."""

    input_bytes: float
    """The chunk's inputs."""

    feature_bytes: float
    """The chunk's features."""


@dataclass(frozen=True, kw_only=True)
class EncoderCost:
    """An encoder: its weights, and the passes of two sizes of chunks."""

    weight_bytes: int
    """Parameters and buffers."""

    trained_bytes: int
    """Parameters that are trained."""

    largest_bytes: int
    """The largest block of parameters that FSDP gathers at once."""

    width: int
    """Features."""

    small: PassCost
    large: PassCost

    @property
    def trained(self) -> bool:
        return self.trained_bytes > 0

    def at(self, rows: float) -> PassCost:
        """Figures for any number of rows, on the line through the two that were counted."""
        if rows == self.large.rows or self.small.rows == self.large.rows:
            return self.large
        share = (rows - self.small.rows) / (self.large.rows - self.small.rows)
        found = {}
        for field in fields(PassCost):
            low, high = getattr(self.small, field.name), getattr(self.large, field.name)
            found[field.name] = max(0.0, low + (high - low) * share)
        return PassCost(**found)


def encoder_cost(
    module: nn.Module,
    inputs: Nest,
    *,
    rows: tuple[int, int],
    precision: EncoderPrecision = "fp32",
    on_cpu: bool = True,
    clock: OperatorClock | None = None,
    notify: Callable[[str], object] = lambda text: None,
) -> EncoderCost:
    """Count what chunks cost in an encoder.

    Args:
        module: The encoder, called as `module(*inputs)` or `module(**inputs)`. It returns features [rows, D].
        inputs: Example inputs with any number of rows. Only shapes and dtypes are used.
        rows: Two sizes of chunks to count, ascending.
        precision: Precision of the encoder; with 16 bits it runs under autocast.
        on_cpu: Count the attention of a CPU; otherwise attention with dropout is counted as the fused kernels of GPUs
            do it, without its matrix of weights.
        clock: Estimates the seconds of operators on a CPU.
        notify: Called with a line about progress.

    Raises:
        ValueError: The module cannot run on fake tensors, or does not return features.
    """
    counted = []
    for size in dict.fromkeys(rows):
        notify(f"counting a chunk of {size:,}")
        counted.append(_passes(module, inputs, size, precision, on_cpu, clock))
    parameters = list(module.parameters())
    return EncoderCost(
        weight_bytes=sum(x.nbytes for x in dict.fromkeys([*parameters, *module.buffers()])),
        trained_bytes=sum(x.nbytes for x in parameters if x.requires_grad),
        largest_bytes=_largest_block(module),
        width=counted[0][1],
        small=counted[0][0],
        large=counted[-1][0],
    )


def _largest_block(module: nn.Module) -> int:
    """Bytes of the largest member of a list of modules, or of the whole if it has none."""
    inside = [sum(x.nbytes for x in part.parameters()) for part in _listed(module)]
    return max(inside, default=sum(x.nbytes for x in module.parameters()))


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            yield from part


def _passes(
    module: nn.Module, inputs: Nest, rows: int, precision: EncoderPrecision, on_cpu: bool, clock: OperatorClock | None
) -> tuple[PassCost, int]:
    with fake_tensors() as fake:
        encoder = fake_module(module)
        for part in encoder.modules():
            if on_cpu and isinstance(part, Pixels):  # written by numpy there, without temporaries
                part.forward = _blank_pixels  # type: ignore[method-assign]
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        chunk = fake_rows(inputs, rows)
        both = LiveBytes(HOLE_SHARE, clock)
        with both, _running(precision, on_cpu):
            features = _features(encoder, chunk, rows)
            encode_peak, forward, grown = both.peak, _work(both), both.grown_seconds
            width, held = features.shape[1], features.nbytes
            if not on_cpu and isinstance(module, Tower | LockedTowerHead):
                held = 4 * features.numel()  # autocast of GPUs normalises in fp32
            if features.requires_grad:
                torch.autograd.backward(features, torch.empty_like(features))
            del features
        del fake
    work = _work(both)
    return PassCost(
        rows=rows,
        encode_peak=encode_peak,
        peak=both.peak,
        unreused=max(0.0, both.peak_with_holes - both.peak),
        input_bytes=sum(x.nbytes for x in tensors_of(chunk)),
        feature_bytes=held,
        encode_seconds=forward["seconds"] - grown,
        **{f"forward_{name}": count for name, count in forward.items()},
        **{f"backward_{name}": work[name] - count for name, count in forward.items()},
    ), width


def _blank_pixels(pixels: Tensor) -> Tensor:
    return torch.empty(pixels.shape)


def _work(live: LiveBytes) -> dict[str, float]:
    names = ("flops", "product_bytes", "moved", "operators", "seconds")
    return {name: float(getattr(live, name)) for name in names}


def _features(encoder: nn.Module, chunk: Nest, rows: int) -> Tensor:
    try:
        found = call(encoder, chunk)
    except Exception as error:  # a model that needs values may raise anything
        remedy = "Pass sample_inputs= that fit its forward; models whose shapes depend on values cannot be planned."
        why = first_line(error)
        raise ValueError(f"model: expected one that runs on fake tensors, got {why}. {remedy}") from error
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != rows:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        bad_value("model", expected="features [rows, D]", got=got, remedy="Wrap it in a module that returns them.")
    return found


@contextmanager
def _running(precision: EncoderPrecision, on_cpu: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if not on_cpu:
            stack.enter_context(_FusedAttention())
        if precision != "fp32":
            stack.enter_context(torch.autocast("cpu", dtype=DTYPES[precision]))
        yield


class _FusedAttention(TorchFunctionMode):
    """Count attention without dropout: fused GPU kernels draw it inside and need no memory for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given = given | {"dropout_p": 0.0} if "dropout_p" in given else given
        return func(*args, **given)


# --- fake tensors -----------------------------------------------------------------------------------------------------


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Context in which tensors have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def fake_module(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are fake; call it inside `fake_tensors`."""
    memo: dict[int, Any] = {}
    for x in dict.fromkeys([*module.parameters(), *module.buffers()]):
        blank: Tensor = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        if isinstance(x, nn.Parameter):
            blank = nn.Parameter(blank, requires_grad=x.requires_grad)
        memo[id(x)] = blank
    return copy.deepcopy(module, memo)


def fake_rows(inputs: Nest, rows: int) -> Nest:
    """Fake inputs with the shapes and dtypes of others, and `rows` rows."""
    count_rows(inputs, "sample_inputs")

    def blank(x: Tensor) -> Tensor:
        return torch.empty((rows, *x.shape[1:]) if x.dim() else (), dtype=x.dtype)

    return map_tensors(blank, inputs)
