"""Times of `clip_loss` and `siglip_loss` against the dense formula, other packages and the prediction.

    for row in compare(torch.device("cpu"), quick=True):
        row.contestant, row.seconds, row.limit_seconds, row.predicted_seconds

Contestants are those of `contratile bench`, which measures more carefully and at more sizes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from contratile import clip_loss, siglip_loss
from contratile.bench.clock import Clock, Step, clock_for
from contratile.bench.contestants.family import CASES
from contratile.bench.contestants.loss import CLIP, Case, LossContestant, LossFunction, LossProblem, with_backward
from contratile.bench.harness import GemmLimit, Notify, Turns, describe, interleave, quiet
from contratile.bench.memory import MiB, no_room
from contratile.doctor.inputs import dtype_name
from contratile.planner import predict

SCALE = 14.3
ROUNDS = 3
MODEL = "contratile.planner's model"
LIMIT = "on a CPU the limit itself"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contestant at one size, forward and backward."""

    device: str
    loss: str
    contestant: str
    n: int
    d: int
    dtype: str
    seconds: float | None
    limit_seconds: float | None
    """Time of the matrix products of our loss, run alone between the turns of the contestants."""

    predicted_seconds: float | None
    """For our own loss only."""

    predicted_by: str
    peak_extra_mib: float | None
    """Beyond inputs and gradients; measured on GPUs only."""

    note: str = ""


def _on_torch(name: str, loss: LossFunction) -> LossContestant:
    step = with_backward(partial(loss, group=None, backend="torch"))
    return LossContestant(name=name, load=lambda: step, about="backend='torch'", linear=16)


TORCH = {"clip": _on_torch("contratile_torch", clip_loss), "siglip": _on_torch("contratile_torch", siglip_loss)}
"""Our loss without kernels."""


def contestants_for(case: Case, device: torch.device) -> list[LossContestant]:
    """Return who is compared on a device."""
    known = case.contestants
    ours = [known["contratile"], *([TORCH[case.name]] if device.type == "cuda" else [])]
    peers = ("dense", "open_clip", "inf_cl" if device.type == "cuda" else "inf_cl_ring", "siglip_kernel")
    others = [known[name] for name in peers if name in known]
    return [*ours, *(who for who in others if device.type == "cuda" or not who.needs_cuda)]


def compare(device: torch.device, *, quick: bool = False, notify: Notify = lambda text: None) -> Iterator[Comparison]:
    """Time every contestant at every size, smaller sizes first."""
    clock = clock_for(device)
    sizes: tuple[int, ...]
    if device.type == "cpu":
        sizes, d, dtype = ((512,) if quick else (1024, 4096)), 256 if quick else 512, torch.float32
    else:
        sizes, d, dtype = ((4096,) if quick else (4096, 16384, 32768)), 512, torch.bfloat16
    for case in (CLIP, CASES["siglip"]):
        for n in sizes:
            yield from _at(case, clock, n, d, dtype, lambda text: notify(f"{device}: {text}"))


def _at(case: Case, clock: Clock, n: int, d: int, dtype: torch.dtype, notify: Notify) -> Iterator[Comparison]:
    loss = f"{case.name}_loss"
    problem = case.problem(n, d, scale=SCALE, dtype=dtype, device=clock.device)
    contestants, notes, steps = contestants_for(case, clock.device), dict[str, str](), dict[str, Step]()
    for who in contestants:
        notify(f"{loss}, {who.name}, warm-up at N={n}")
        try:
            notes[who.name] = no_room(who.predicted_bytes(n, d), clock) or ""
            if not notes[who.name]:
                with quiet():
                    steps[who.name] = problem.bind(who.load())
                    steps[who.name]()
        except Exception as error:  # not installed, or out of memory: a result too
            notes[who.name] = describe(error)
            steps.pop(who.name, None)
    limit_dtype = dtype if clock.device.type == "cuda" else torch.float32
    limit = GemmLimit(n, d, products=case.products, device=clock.device, dtype=limit_dtype)
    tell: Notify = lambda text: notify(f"{loss}, N={n}: {text}")  # noqa: E731 - a keyword of the next line
    timed = interleave(steps, limit, rounds=ROUNDS, clock=clock.seconds, notify=tell)
    peaks = {name: _peak(clock, steps[name], problem) for name, turns in timed.items() if not turns.failure}
    for who in contestants:
        turns = timed.get(who.name, Turns())
        best, least = (turns.best, turns.limit) if turns.steps and not turns.failure else (None, None)
        row = Comparison(
            device=clock.name,
            loss=loss,
            contestant=who.name,
            n=n,
            d=d,
            dtype=dtype_name(dtype),
            seconds=best,
            limit_seconds=least,
            predicted_seconds=None,
            predicted_by="",
            peak_extra_mib=peaks.get(who.name),
            note=turns.failure or notes[who.name],
        )
        yield _with_prediction(row, clock.device, dtype) if who.name == "contratile" else row


def _peak(clock: Clock, step: Step, problem: LossProblem) -> float | None:
    """Peak memory on a GPU. On a CPU it takes a process of its own: see `contratile bench loss`."""
    if clock.device.type == "cpu":
        return None
    problem.clear()
    growth = clock.peak_growth(step)
    gradients = sum(leaf.grad.nbytes for leaf in problem.leaves if leaf.grad is not None)
    return None if growth is None else max(0.0, (growth - gradients) / MiB)


def _with_prediction(row: Comparison, device: torch.device, dtype: torch.dtype) -> Comparison:
    if device.type == "cpu":
        return replace(row, predicted_seconds=row.limit_seconds, predicted_by=LIMIT)
    predicted = predicted_seconds(device, row.n, row.d, dtype) if row.loss == "clip_loss" else None
    return row if predicted is None else replace(row, predicted_seconds=predicted, predicted_by=MODEL)


def predicted_seconds(device: torch.device, n: int, d: int, dtype: torch.dtype) -> float | None:
    """Return what the planner predicts for a step of `clip_loss`; None for a device that is not in its table."""
    if device.type != "cuda":
        return None
    try:
        return predict(torch.cuda.get_device_name(device), n, d, dtype).seconds
    except ValueError:
        return None
