"""The contestants over ranks: the symmetric loss over the global batch, called the way their packages mean it.

    step = RING_CONTESTANTS["open_clip_local"].load()    # in a rank whose default process group is up
    value = step(image, text, scale)                     # this rank's pairs; gradients are in .grad

`floats(n, total, d)` is what a rank with n of `total` pairs holds beyond inputs and gradients: measured, and used
only to predict what cannot run. What a rank costs before it does anything is added to it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contratile import clip_loss
from contratile.bench.contestants.loss import Step, backward, cure_torchvision, inf_cl_ring

RANK_BYTES = 500 << 20
"""Interpreter, torch and the contestants' packages."""


@dataclass(frozen=True, kw_only=True)
class RingContestant:
    """One implementation."""

    name: str
    load: Callable[[], Step]
    about: str
    """One line: what is called and what is peculiar about it."""

    floats: Callable[[int, int, int], float]
    package: str | None = None
    """Its distribution, where that is not this one."""

    def predicted_bytes(self, world: int, total: int, d: int) -> float:
        """Of all ranks together, with inputs and gradients."""
        n = total // world
        return world * (RANK_BYTES + 4 * (4 * n * d + self.floats(n, total, d)))


def _contratile() -> Step:
    return backward(lambda image, text, scale: clip_loss(image, text, scale, group="auto"))


def _open_clip(*, local_loss: bool = False, gather_with_grad: bool = False) -> Step:
    cure_torchvision()
    from open_clip.loss import ClipLoss

    modes = {"local_loss": local_loss, "gather_with_grad": gather_with_grad}
    return backward(ClipLoss(**modes, rank=dist.get_rank(), world_size=dist.get_world_size()))


def _disco() -> Step:
    """After DisCo-CLIP: rows of this rank only, and what they owe to others' features is returned to the owners."""
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
        about="ClipLoss(): all features gathered, N x N logits on every rank, others' features are constants",
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
RING_PACKAGES = tuple(dict.fromkeys(contestant.package for contestant in _ALL if contestant.package))
