"""The symmetric loss on one rank of many: steps of a simulated rank, and formulas for what does not fit here.

    step = simulated("inf_cl", world=3)          # on this process: every rank holds the same pairs
    MEMORY["open_clip_local"](n, total, d)       # bytes beyond inputs and gradients

Formulas count the fp32 tensors that a contestant's code holds at its peak: those of others are `planner.peers`. N pairs
on all ranks, n on one, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contratile import clip_loss
from contratile.bench.contestants import private_copy
from contratile.bench.contestants.loss import LossStep, with_backward
from contratile.engine.plan import plan_tiles
from contratile.losses.functional import pair_lse
from contratile.planner.peers import Peer, peer_loss_bytes
from contratile.ring.simulated import SimulatedRank

FP32 = 4


def _tiles(n: int, d: int) -> int:
    """The tile workspace of ours."""
    return plan_tiles(n, n, d).workspace_bytes


def _peer(name: Peer) -> Callable[[int, int, int], float]:
    return lambda n, total, d: peer_loss_bytes(name, batch=total, ranks=total // n, width=d, itemsize=FP32)


MEMORY: dict[str, Callable[[int, int, int], float]] = {
    # Keys: the visiting block and the next. Their gradients: one filled, one leaving, one arriving. dQ. Less dQ, dK.
    "contratile": lambda n, total, d: FP32 * 4 * n * d + _tiles(n, d),
    # Between nodes one of each leaving, one arriving.
    "contratile_nodes": lambda n, total, d: FP32 * 8 * n * d + _tiles(n, d),
    "open_clip": _peer("clip"),
    "open_clip_local": _peer("open_clip"),
    "inf_cl": _peer("inf_cl"),
}
ABOUT = {
    "contratile": "clip_loss on a flat ring",
    "contratile_nodes": "clip_loss on a ring over nodes",
    "open_clip": "open_clip's ClipLoss(), the paper's CLIP",
    "open_clip_local": "open_clip's ClipLoss(local_loss=True, gather_with_grad=True), the paper's OpenCLIP",
    "inf_cl": "cal_inf_loss of the paper's package for both directions",
}


def simulated(name: str, world: int, nodes: int = 1) -> tuple[LossStep, SimulatedRank | None]:
    """A step of one rank, and for ours the rank with its log.

    With fewer queries than keys the step is that of the log-sum-exps of both sides, which the loss is made of: the
    buffers of a ring hold keys.
    """
    if name == "inf_cl":
        return _inf_cl(world), None
    rank = SimulatedRank.among(world, nodes=nodes)

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        ring: Any = "nodes" if name == "contratile_nodes" else "flat"
        if len(image) == len(text):
            return clip_loss(image, text, scale, group=rank, ring=ring)
        return torch.stack([x.sum() for x in pair_lse(image, text, scale, group=rank, ring=ring)]).sum()

    return with_backward(loss), rank


def _inf_cl(world: int) -> LossStep:
    """The paper's ring without a network. Tiles in PyTorch replace its kernels; they allocate the same results."""
    import torch.distributed as dist

    class Echo:
        """All ranks are in the same state: what arrives is what leaves."""

        def __init__(self, group: object) -> None:
            self.world_size = world

        def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
            return to_send.clone()

        def commit(self) -> None: ...

        def wait(self) -> None: ...

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, not in __all__
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    theirs = private_copy("inf_cl.ring")
    theirs.RingComm = Echo
    theirs._flash_prob_forward = _tiled_lse
    theirs._flash_prob_backward = _tiled_gradients

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        d = image.shape[1]
        head = 256 if d % 256 == 0 else d
        rows = theirs.cal_inf_loss(image, text, scale=scale, head_dim=head)
        cols = theirs.cal_inf_loss(text, image, scale=scale, head_dim=head)
        result: Tensor = (rows + cols) / 2
        return result

    return with_backward(loss)


EDGE = 512


def _tiled_lse(q: Tensor, k: Tensor) -> Tensor:
    """The log-sum-exp of each query, as `inf_cl.flash._flash_prob_forward` returns it."""
    keys = k.flatten(1)
    lse = q.new_empty(len(q))
    for start in range(0, len(q), EDGE):
        rows, parts = q[start : start + EDGE].flatten(1), []
        for at in range(0, len(keys), EDGE):
            parts.append((rows @ keys[at : at + EDGE].T).logsumexp(1))
        lse[start : start + EDGE] = torch.stack(parts).logsumexp(0)
    return lse


def _tiled_gradients(q: Tensor, k: Tensor, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """dQ and dK of a block, as `inf_cl.flash._flash_prob_backward` returns them."""
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    keys, d_keys = k.flatten(1), dk.flatten(1)
    for start in range(0, len(q), EDGE):
        here = slice(start, start + EDGE)
        rows, d_rows = q[here].flatten(1), dq[here].flatten(1)
        for at in range(0, len(keys), EDGE):
            there = slice(at, at + EDGE)
            weights = (rows @ keys[there].T - lse[here, None]).exp_() * dlse[here, None]
            d_rows += weights @ keys[there]
            d_keys[there] += weights.T @ rows
    return dq, dk
