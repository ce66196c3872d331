"""Memory of the losses of other packages, counted from the tensors that their code holds at its peak.

>>> peer_loss_bytes("open_clip", batch=131072, ranks=8, width=768, itemsize=4) / 2**30 > 32
True
>>> print(held_table("inf_cl", batch=32768, ranks=8, width=768, itemsize=4).splitlines()[0])
| held at the peak | number | shape | MiB |

N pairs in all, n = N / P on each rank, D features. Each line of the tables below is a tensor that can be found in the
code of open_clip_torch 3.3.0 (`open_clip/loss.py`) or inf-cl 1.2.1 (`inf_cl/ring.py`, `flash.py`). Vectors of length n
or N (labels, log-sum-exps) are left out. The code is run as its package intends, without autocast around the loss:
tensors of open_clip have the dtype of the features, those of Inf-CL are fp32. Under autocast, too, open_clip's features
are fp32, because `F.normalize` promotes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from contratile.errors import check_choice, check_count

Peer = Literal["clip", "open_clip", "inf_cl"]
TensorShape = Literal["N x N", "n x N", "N x D", "n x D"]
FP32 = 4


@dataclass(frozen=True)
class Held:
    """Tensors of one kind that are alive at the same time."""

    what: str
    number: int
    shape: TensorShape
    itemsize: int | None = None
    """Bytes of an element; None: those of the features."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call."""

    batch: int
    ranks: int
    width: int
    itemsize: int

    @property
    def local(self) -> int:
        """Pairs of the rank with the most pairs."""
        return -(-self.batch // self.ranks)

    def bytes_of(self, held: Held) -> int:
        """Bytes of all tensors of a line."""
        lengths = {"N": self.batch, "n": self.local, "D": self.width}
        rows, cols = held.shape.split(" x ")
        return held.number * lengths[rows] * lengths[cols] * (held.itemsize or self.itemsize)


Moment = tuple[Held, ...]
"""The tensors that are alive at a moment of the step that may be its peak."""

CLIP: tuple[Moment, ...] = (
    (  # backward of the first cross entropy
        Held("image and text features of all ranks", 2, "N x D"),
        Held("scale * image features, saved by the product", 1, "N x D"),
        Held("log_softmax of logits and of logits.T, saved by the cross entropies", 2, "N x N"),
        Held("gradient of a log_softmax, from nll_loss", 1, "N x N"),
        Held("gradient of the logits, from that log_softmax", 1, "N x N"),
    ),
    (  # backward of the product: the larger one if N is below about 2 D / 3
        Held("image and text features of all ranks", 2, "N x D"),
        Held("scale * image features, saved by the product", 1, "N x D"),
        Held("gradients of both factors of the product", 2, "N x D"),
        Held("gradient of the logits", 1, "N x N"),
    ),
)
"""`ClipLoss()`: every rank gathers all features and computes all logits."""

OPEN_CLIP: tuple[Moment, ...] = (
    (  # end of the forward pass, and as much in the backward pass of the first cross entropy
        Held("image and text features of all ranks", 2, "N x D"),
        Held("scale * image and scale * text features, saved by the products", 2, "n x D"),
        Held("logits per image and per text", 2, "n x N"),
        Held("log_softmax of both, saved by the cross entropies", 2, "n x N"),
    ),
    (  # the second all_gather: the larger one if N is below D / 4
        Held("image features of all ranks", 1, "N x D"),
        Held("text features as they arrived, a tensor per rank", 1, "N x D"),
        Held("text features of all ranks in one tensor", 1, "N x D"),
    ),
)
"""`ClipLoss(local_loss=True, gather_with_grad=True)`: every rank computes the logits of its own pairs."""

ALONE: tuple[Moment, ...] = (
    (
        Held("scale * image and scale * text features, saved by the products", 2, "n x D"),
        Held("logits per image and per text", 2, "n x N"),
        Held("log_softmax of both, saved by the cross entropies", 2, "n x N"),
    ),
)
"""`ClipLoss()` in one process, whatever its options: nothing is gathered, and both logits are computed."""

_INF_CL_SAVED: Moment = (
    Held("scale * query of the first direction, saved", 1, "n x D", FP32),
    Held("key[labels] of the first direction, saved", 1, "n x D", FP32),
    Held("scale * query of the second direction, saved", 1, "n x D", FP32),
    Held("gradients of query and key through the positives", 2, "n x D", FP32),
)
_INF_CL_CASTS = Held("fp32 copies of the keys of both directions", 2, "n x D", FP32)
"""fp32 copies of features in other dtypes. Those of the queries replace scale * query."""


def _inf_cl(sizes: Sizes) -> tuple[Moment, ...]:
    """`cal_inf_loss` per direction. The peak is in the backward pass of the second direction, which comes first."""
    saved = _INF_CL_SAVED if sizes.itemsize == FP32 else (*_INF_CL_SAVED, _INF_CL_CASTS)
    if sizes.ranks == 1:  # `cal_flash_loss`
        more = Held("gradients of the kernels, or of key[labels] and its source", 2, "n x D", FP32)
        return ((*saved, more),)
    ring = Held("keys that are used", 1, "n x D", FP32), Held("dK under way: sent and received", 2, "n x D", FP32)
    new, total = Held("dQ and dK of this hop", 2, "n x D", FP32), Held("dQ so far", 1, "n x D", FP32)
    if sizes.ranks == 2:  # where dK of the hop is added to what was received
        return ((*saved, *ring, new, total, Held("the sum of dK", 1, "n x D", FP32)),)
    last = Held("dQ and dK of the hop before, until the kernels return", 2, "n x D", FP32)
    if sizes.ranks == 3:  # the first hop with a hop before it is the last one: no keys are received any more
        return ((*saved, *ring, new, total, last),)
    return ((*saved, *ring, Held("keys that are received", 1, "n x D", FP32), new, total, last),)


def held_at_peak(name: Peer, *, batch: int, ranks: int, width: int, itemsize: int) -> list[tuple[Held, int]]:
    """The tensors that a package's loss holds at its peak, with their bytes. Arguments as for `peer_loss_bytes`."""
    check_choice("name", name, get_args(Peer))
    for argument, value in {"batch": batch, "ranks": ranks, "width": width, "itemsize": itemsize}.items():
        check_count(argument, value, least=1)
    sizes = Sizes(batch, ranks, width, itemsize)
    if name == "inf_cl":
        moments = _inf_cl(sizes)
    elif ranks == 1:
        moments = ALONE
    else:
        moments = CLIP if name == "clip" else OPEN_CLIP
    lines = [[(held, sizes.bytes_of(held)) for held in moment] for moment in moments]
    return max(lines, key=lambda moment: sum(size for _, size in moment))


def peer_loss_bytes(name: Peer, *, batch: int, ranks: int, width: int, itemsize: int) -> int:
    """Bytes that the loss of a package holds at its peak on each device, beyond the local features.

    Forward and backward. Final gradients of the local features are not among them: at these peaks they do not exist
    yet. (A caller that keeps room for them anyway adds 2 * batch / ranks * width * itemsize.)

    Args:
        name: "clip" (open_clip's `ClipLoss()`: N x N logits on every rank), "open_clip" (`local_loss` and
            `gather_with_grad`) or "inf_cl" (the paper's `cal_inf_loss`, once per direction).
        batch: Pairs of all ranks together.
        ranks: Number of devices.
        width: Features D.
        itemsize: Bytes of a feature: 4 for fp32, 2 for fp16 and bf16.

    Returns:
        Bytes per device.

    Raises:
        ValueError: The name is unknown or a size is not positive.
        TypeError: A size is not an int.

    Example:
        >>> peer_loss_bytes("clip", batch=65536, ranks=8, width=768, itemsize=4) / 2**20
        66112.0
    """
    return sum(size for _, size in held_at_peak(name, batch=batch, ranks=ranks, width=width, itemsize=itemsize))


def held_table(name: Peer, *, batch: int, ranks: int, width: int, itemsize: int) -> str:
    """What `peer_loss_bytes` adds up, as a Markdown table."""
    lines = ["| held at the peak | number | shape | MiB |", "| --- | --- | --- | --- |"]
    for held, size in held_at_peak(name, batch=batch, ranks=ranks, width=width, itemsize=itemsize):
        lines.append(f"| {held.what} | {held.number} | {held.shape} | {size / 2**20:,.0f} |")
    return "\n".join(lines)
