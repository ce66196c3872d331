"""Is every loss right on this machine? Values and gradients are compared with the dense formula in fp64.

    check_accuracy(torch.device("cpu"), "torch", "clip_loss", torch.float32).ok

Allowed is three times the error of the dense formula in the compute dtype (fp32 or fp64), plus a few rounding errors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from contratile import reference
from contratile.doctor.inputs import SCALE, compute_dtype, dtype_name, error_text, unit_features
from contratile.losses import functional

CheckedLoss = Callable[..., Tensor]
LOSSES: dict[str, CheckedLoss] = {
    "clip_loss": lambda of, q, k, s, **how: of.clip_loss(q, k, s, **how),
    "info_nce": lambda of, q, k, s, **how: of.info_nce(q[::2], k, s, labels=_indices(q[::2]) * 2, **how),
    "nt_xent": lambda of, q, k, s, **how: of.nt_xent(q, k, 1 / s, **how),
    "sup_con": lambda of, q, k, s, **how: of.sup_con(torch.cat([q, k]), _indices(q).repeat(2) % 7, 1 / s, **how),
    "siglip_loss": lambda of, q, k, s, **how: of.siglip_loss(q, k, s, -5.0, **how),
}
"""How each loss is called: `of` is `losses.functional` or `reference`, then queries, keys and scale."""

FOUR = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
OBJECTIVES: dict[str, CheckedLoss] = {
    "several positives": lambda of, q, k, s, **how: of.clip_loss(
        q, k, s, ids=_indices(q) % 7, same_id="positive", **how
    ),
    "siglip_loss, positives": lambda of, q, k, s, **how: of.siglip_loss(
        q, k, s, -5.0, ids=_indices(q) % 7, same_id="positive", **how
    ),
    "key_bias": lambda of, q, k, s, **how: of.info_nce(q, k, s, key_bias=s.detach() * k.detach().to(s)[:, 0], **how),
    "in_batch_negatives=False": lambda of, q, k, s, **how: of.info_nce(
        q, k, s, extra_keys=k.flip(0)[::2], in_batch_negatives=False, **how
    ),
    "directions": lambda of, q, k, s, **how: of.info_nce(q, k, s, directions=FOUR, **how),
    "hardness": lambda of, q, k, s, **how: of.info_nce(
        q, k, s, hardness_mode="all_negatives", hardness_strength=9.0, **how
    ),
    "matryoshka_dims": lambda of, q, k, s, **how: of.clip_loss(q, k, s, matryoshka_dims=_halves(q), **how),
    "teacher": lambda of, q, k, s, **how: of.clip_loss(
        q, k, s, teacher=(q.detach().roll(1, 1), k.detach(), 2 * s.detach()), **how
    ),
    "guide": lambda of, q, k, s, **how: of.clip_loss(q, k, s, guide=(_whole(q, 7), _whole(k, 5)), **how),
}
"""Options that change the computation of a tile."""

CHECKED = {**LOSSES, **OBJECTIVES}
NOT_IN_KERNELS = "matryoshka_dims", "teacher", "guide"


def _indices(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _halves(x: Tensor) -> tuple[int, ...]:
    return x.shape[1] // 4, x.shape[1] // 2, x.shape[1]


def _whole(x: Tensor, step: int) -> Tensor:
    """Round features to whole numbers: their products are exact, so every implementation drops the same pairs."""
    numbers = torch.arange(len(x) * 4, device=x.device).view(len(x), 4)
    return (numbers * step % 11 - 5).to(x.dtype)


def checked_losses(backend: str) -> list[str]:
    """Return what a backend is checked for."""
    return [loss for loss in CHECKED if backend != "triton" or loss not in NOT_IN_KERNELS]


@dataclass(frozen=True)
class Accuracy:
    """Errors of one loss relative to the largest entry: of its value, and of its worst gradient."""

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
    """The exception, if the loss raised one."""

    def __str__(self) -> str:
        what = self.note or (
            f"error {self.value_error:.1e} of the loss ({self.value_allowed:.1e} allowed) and "
            f"{self.grad_error:.1e} of a gradient ({self.grad_allowed:.1e} allowed)"
        )
        return f"{self.device}: {self.loss}, {self.backend}, {self.dtype}: {what}"


def check_accuracy(
    device: torch.device,
    backend: str,
    loss: str,
    dtype: torch.dtype,
    *,
    n: int = 97,
    d: int = 40,
    precision: str | None = None,
) -> Accuracy:
    """Compare a loss of N pairs, or an option of one, with fp64. The dense formula has an error in the same dtype, too,
    which is allowed."""
    exact, allowed = _yardstick(device, loss, dtype, n, d)
    if precision == "tf32":  # operands of 11 bits
        allowed = allowed[0] + SCALE * 2.0**-11, allowed[1] + SCALE * 2.0**-10
    key = str(device), backend, loss, dtype_name(dtype)
    how = {"group": None, "backend": backend} | ({"precision": precision} if precision else {})
    try:
        errors = _errors(_value_and_grads(loss, functional, unit_features(n, d, dtype, device), **how), exact)
    except Exception as error:  # whatever a user would run into
        return Accuracy(*key, float("nan"), allowed[0], float("nan"), allowed[1], ok=False, note=error_text(error))
    ok = all(error <= limit for error, limit in zip(errors, allowed, strict=True))
    return Accuracy(*key, errors[0], allowed[0], errors[1], allowed[1], ok)


@lru_cache(maxsize=8)  # for checks of the same call in many ways
def _yardstick(
    device: torch.device, loss: str, dtype: torch.dtype, n: int, d: int
) -> tuple[list[Tensor], tuple[float, float]]:
    """Value and gradients in fp64, and the errors that are allowed."""
    inputs = unit_features(n, d, dtype, device)
    wide = compute_dtype(dtype)
    exact = _value_and_grads(loss, reference, [x.cpu().double() for x in inputs])
    naive = _errors(_value_and_grads(loss, reference, [x.to(wide) for x in inputs]), exact)
    noise = 8 * torch.finfo(wide).eps * (1 + SCALE)
    rounding = 0.0 if dtype == wide else 2 * torch.finfo(dtype).eps  # of a gradient, and of the factors it is made from
    return exact, (3 * naive[0] + noise, 3 * naive[1] + noise + rounding)


def checked_dtypes(device: torch.device, backend: str, quick: bool) -> list[torch.dtype]:
    """Return the dtypes in which a backend is checked on a device."""
    if backend == "triton":
        # Triton's interpreter treats the bits of bf16 as integers.
        half = torch.float16 if device.type == "cpu" else torch.bfloat16
        return [torch.float32, half] if quick or device.type == "cpu" else [torch.float32, half, torch.float16]
    # The dense backend computes in the features' dtype, so no accuracy is expected of it in 16 bits.
    halves = [] if backend == "dense" else [torch.bfloat16] if quick else [torch.bfloat16, torch.float16]
    return [torch.float32, *halves, *([] if quick or device.type == "mps" else [torch.float64])]


def _value_and_grads(loss: str, of: Any, inputs: Sequence[Tensor], **how: Any) -> list[Tensor]:
    """The loss and its gradients, in fp64 on the CPU."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = CHECKED[loss](of, *leaves, **how)
    grads = torch.autograd.grad(value, leaves)
    return [x.detach().cpu().double() for x in (value, *grads)]


def _errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Relative errors of the value and of the worst gradient; NaN counts as infinite."""
    errors = [
        float(((a - b).abs().max() / b.abs().max()).nan_to_num(nan=float("inf")))
        for a, b in zip(got, exact, strict=True)
    ]
    return errors[0], max(errors[1:])
