"""Contestants of the symmetric loss over ranks, each called the way its package intends.

step = RING_CONTESTANTS["open_clip_local"].load()    # in a rank whose default process group is up
value = step(image, text, scale)                     # this rank's pairs; gradients are in .grad
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contratile import clip_loss
from contratile.bench.contestants import Contestant, packages_of
from contratile.bench.contestants.loss import LossStep, inf_cl_ring, with_backward

RANK_BYTES = 500 << 20
"""What a rank needs for Python, torch and the contestants' packages."""


@dataclass(frozen=True, kw_only=True)
class RingContestant(Contestant):
    """An implementation of the symmetric loss over ranks."""

    load: Callable[[], LossStep]
    floats: Callable[[int, int, int], float]
    """What a rank with n of `total` pairs of D features holds beyond inputs and gradients; only predicts memory."""

    def predicted_bytes(self, world: int, total: int, d: int) -> float:
        """Return the memory of all ranks together, inputs and gradients included."""
        n = total // world
        return world * (RANK_BYTES + 4 * (4 * n * d + self.floats(n, total, d)))


def _contratile() -> LossStep:
    return with_backward(lambda image, text, scale: clip_loss(image, text, scale, group="auto"))


def _open_clip(*, local_loss: bool = False, gather_with_grad: bool = False) -> LossStep:
    from open_clip.loss import ClipLoss

    modes = {"local_loss": local_loss, "gather_with_grad": gather_with_grad}
    return with_backward(ClipLoss(**modes, rank=dist.get_rank(), world_size=dist.get_world_size()))


def _disco() -> LossStep:
    """The idea of DisCo-CLIP: compute this rank's rows, then reduce gradients of other features to their owners."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def gathered(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.detach())
        return torch.cat(parts).requires_grad_()

    def step(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        n = len(image)
        images, texts = gathered(image), gathered(text)
        labels = torch.arange(rank * n, rank * n + n)
        rows = F.cross_entropy(scale * image @ texts.T, labels)
        cols = F.cross_entropy(scale * text @ images.T, labels)
        value = (rows + cols) / 2
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        for mine, everybody in ((image, images), (text, texts)):
            assert mine.grad is not None and everybody.grad is not None
            shares = torch.split(everybody.grad, n)
            for owner, share in enumerate(shares):
                dist.reduce(share, dst=owner)
            mine.grad += shares[rank]
        return value.detach()

    return step


_ALL = (
    RingContestant(
        name="contratile",
        load=_contratile,
        about='clip_loss(group="auto"): one ring for both directions, no scores kept',
        floats=lambda n, total, d: 6 * n * d + 8e6,
    ),
    RingContestant(
        name="open_clip",
        load=_open_clip,
        about="ClipLoss(): all features gathered, N x N logits on every rank, other ranks' features are constants",
        floats=lambda n, total, d: 4.1 * total * total + 6 * total * d,
        package="open_clip_torch",
    ),
    RingContestant(
        name="open_clip_grad",
        load=lambda: _open_clip(gather_with_grad=True),
        about="ClipLoss(gather_with_grad=True): N x N logits on every rank",
        floats=lambda n, total, d: 4.1 * total * total + 8 * total * d,
        package="open_clip_torch",
    ),
    RingContestant(
        name="open_clip_local",
        load=lambda: _open_clip(local_loss=True, gather_with_grad=True),
        about="ClipLoss(local_loss=True, gather_with_grad=True): two N/P x N logits",
        floats=lambda n, total, d: 4.1 * n * total + 12 * total * d,
        package="open_clip_torch",
    ),
    RingContestant(
        name="disco",
        load=_disco,
        about="the idea of DisCo-CLIP: gathered without gradient, two N/P x N logits, gradients reduced to owners",
        floats=lambda n, total, d: 4.1 * n * total + 12 * total * d,
    ),
    RingContestant(
        name="inf_cl_ring",
        load=inf_cl_ring,
        about="cal_ring_loss per direction, the paper's package: two rings, N/P x N/P scores at a time",
        floats=lambda n, total, d: 4 * n * n + 16 * n * d,
        package="inf-cl",
    ),
)

RING_CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
RING_PACKAGES = packages_of(_ALL)
