"""The options `matryoshka_dims`, `matryoshka_weights`, `matryoshka_normalize`: a sum of losses of truncated features.

loss = sum over m of weight_m * loss(first dim_m features of every row, divided by their norm)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.engine.autograd import stand_in as engine_stand_in
from contratile.engine.prefixes import SMALLEST_NORM, add_norm_grads_, blocks_of, reciprocal_norms
from contratile.engine.spec import Spec
from contratile.errors import bad_type, bad_value, transform_under_way
from contratile.losses.hard_negatives import own_products


class Matryoshka(NamedTuple):
    """The dimensions in ascending order, each with its weight."""

    dims: tuple[int, ...]
    weights: tuple[float, ...]
    normalize: bool

    @classmethod
    def of(cls, dims: Sequence[int], weights: Sequence[float] | None, normalize: bool) -> Matryoshka:
        each = sorted(zip(dims, [1.0] * len(dims) if weights is None else weights, strict=True))
        return cls(tuple(dim for dim, _ in each), tuple(float(weight) for _, weight in each), normalize)

    def spec(self, spec: Spec) -> Spec:
        return spec._replace(dims=self.dims, normalize=self.normalize)

    def total(self, losses: Tensor) -> Tensor:
        """The weighted sum of losses [N, dims] over the dimensions [N]."""
        return (losses * losses.new_tensor(self.weights)).sum(1)

    def own_products(
        self, query: Tensor, hard: Tensor, mask: Tensor | None = None, stand_in: Tensor | None = None
    ) -> Tensor:
        """`hard_negatives.own_products` for each dimension [N, H, dims]."""
        proxy = engine_stand_in(hard)  # gradients of blocks and of norms add up, and almost cancel
        hard = hard if proxy is None else hard.detach()
        if torch.compiler.is_compiling() or transform_under_way((query, hard)):  # no stand-ins: add up in fp32
            acc = torch.promote_types(query.dtype, torch.float32)
            query, hard = query.to(acc), hard.to(acc)
        blocks = [
            own_products(
                query[:, b], hard[..., b], mask, *(None if x is None else x[..., b] for x in (stand_in, proxy))
            )
            for b in blocks_of(self.dims)
        ]
        products = torch.stack(blocks, -1).cumsum(-1)
        if not self.normalize:
            return products
        n, h, d = hard.shape
        flat = None if mask is None else mask.reshape(n * h)
        rows = None if proxy is None else proxy.reshape(n * h, d)
        of_hard = _reciprocal_norms(hard.reshape(n * h, d), self.dims, flat, rows).view(n, h, len(self.dims))
        return products * _reciprocal_norms(query, self.dims, None, stand_in).unsqueeze(1) * of_hard


def check_matryoshka(
    dims: Sequence[int] | None, weights: Sequence[float] | None, normalize: bool, width: int, **others: Any
) -> None:
    """Refuse unusable dimensions and weights, and `others`: options that cannot be combined with them, if truthy."""
    name = "matryoshka_dims"
    if not isinstance(normalize, bool):
        remedy = "True divides each truncated row by its norm."
        bad_type("matryoshka_normalize", expected="True or False", got=type(normalize).__name__, remedy=remedy)
    if dims is None:
        for other, given in (
            ("matryoshka_weights", weights is not None),
            ("matryoshka_normalize=False", not normalize),
        ):
            if given:
                bad_value(other, expected=f"{name}= with it", got="none", remedy=f"Pass {name}= too, or drop it.")
        return
    remedy = "Pass the numbers of leading features to train, for example (64, 256, 768)."
    if not isinstance(dims, tuple | list) or not all(type(dim) is int for dim in dims):
        bad_type(name, expected="a tuple of integers", got=repr(dims), remedy=remedy)
    if not dims or len(set(dims)) < len(dims) or not all(1 <= dim <= width for dim in dims):
        expected = f"distinct numbers from 1 to the {width} features"
        bad_value(name, expected=expected, got=tuple(dims) or "none", remedy=remedy)
    if weights is not None:
        _check_weights(weights, len(dims))
    for other, given in others.items():
        if given:
            bad_value(f"{name} and {other}", expected="one of them", got="both", remedy=f"Drop {other}=.")


def _check_weights(weights: Sequence[float], dims: int) -> None:
    name, remedy = "matryoshka_weights", "Pass one weight for each dimension, in the order of matryoshka_dims."
    if not isinstance(weights, tuple | list) or not all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in weights
    ):
        bad_type(name, expected="a tuple of numbers", got=repr(weights), remedy=remedy)
    if len(weights) != dims:
        bad_value(name, expected=f"{dims} numbers", got=f"{len(weights)}", remedy=remedy)
    if not all(0 <= x < math.inf for x in weights):
        bad_value(name, expected="finite numbers from 0 up", got=tuple(weights), remedy=remedy)


def _reciprocal_norms(x: Tensor, dims: tuple[int, ...], mask: Tensor | None, stand_in: Tensor | None) -> Tensor:
    """1 / norm of truncated rows [N, dims], differentiable; rows where the mask is False are ignored."""
    if torch.compiler.is_compiling() or transform_under_way((x,)):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(1), 1)
        squares = torch.stack([x[:, :dim].square().sum(1) for dim in dims], 1)
        return squares.clamp_min(SMALLEST_NORM**2).rsqrt()
    return _ReciprocalNorms.apply(x, dims, mask, stand_in)  # type: ignore[no-any-return, no-untyped-call]


class _ReciprocalNorms(torch.autograd.Function):
    """Computes in the accumulation dtype, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], mask: Tensor | None, stand_in: Tensor | None) -> Tensor:
        factor = reciprocal_norms(x, dims)
        if mask is not None:
            factor.masked_fill_(~mask.unsqueeze(1), 0)
        ctx.dims = dims
        ctx.save_for_backward(x, mask, factor)
        return factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        x, mask, factor = ctx.saved_tensors
        wants_rows, _, _, full = ctx.needs_input_grad
        if not (full or wants_rows):
            return None, None, None, None
        dx = torch.zeros(x.shape, dtype=grad.dtype, device=x.device)
        add_norm_grads_(dx, x, ctx.dims, factor, grad * factor)
        if mask is not None:  # padding may hold anything, even NaN
            dx.masked_fill_(~mask.unsqueeze(1), 0)
        return (None, None, None, dx) if full else (dx.to(x.dtype), None, None, None)
