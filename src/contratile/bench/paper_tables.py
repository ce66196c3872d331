"""The figures of the Inf-CL paper (arXiv 2410.17243, tables 1 and 2, figure 4), as data.

Methods are named as in `planner.peers`: "clip" is the paper's CLIP (vanilla loss), "open_clip" its OpenCLIP (local
loss), "inf_cl" its own. Batches are in units of 1,024 pairs, memory in the paper's "GB" (see `PAPER_GB`).
"""

from __future__ import annotations

from typing import NamedTuple

from contratile.planner.peers import Peer

PAPER_GB = 1000 * 2**20
"""Bytes of the paper's "GB": 1,000 MiB. With 2**30 or 10**9 bytes the digits of its quadratic rows cannot be met."""


class Reported(NamedTuple):
    """One figure of the paper."""

    model: str
    devices: int
    method: Peer
    batch: int
    """In units of 1,024 pairs."""

    value: float
    offload: bool = False


_L, _B = "ViT-L/14", "ViT-B/16"

LOSS_MEMORY = (
    *(Reported(_L, 8, "clip", k, gb) for k, gb in ((32, 16.67), (64, 66.11))),
    *(Reported(_L, 8, "open_clip", k, gb) for k, gb in ((32, 2.27), (64, 8.63), (128, 33.64))),
    *(Reported(_L, 8, "inf_cl", k, gb) for k, gb in ((32, 0.18), (64, 0.36), (128, 0.72), (256, 1.45))),
    Reported(_L, 8, "inf_cl", 1024, 6.53, offload=True),
    *(Reported(_L, 32, "clip", k, gb) for k, gb in ((32, 16.66), (64, 66.11))),
    *(Reported(_L, 32, "open_clip", k, gb) for k, gb in ((32, 0.71), (64, 2.45), (128, 8.98), (256, 34.35))),
    *(Reported(_L, 32, "inf_cl", k, gb) for k, gb in ((32, 0.05), (64, 0.09), (128, 0.18), (256, 0.35), (1024, 1.44))),
    # beside the largest batches of table 2
    Reported(_B, 8, "clip", 68, 74.39),
    Reported(_B, 8, "open_clip", 172, 59.95),
    Reported(_B, 8, "inf_cl", 800, 3.01),
    Reported(_B, 32, "open_clip", 360, 66.29),
    Reported(_B, 32, "inf_cl", 3456, 3.27),
    Reported(_L, 8, "open_clip", 152, 47.23),
    Reported(_L, 8, "inf_cl", 448, 2.52),
    Reported(_L, 32, "open_clip", 352, 64.13),
    Reported(_L, 32, "inf_cl", 2048, 2.89),
    Reported(_L, 8, "open_clip", 184, 69.10, offload=True),
    Reported(_L, 8, "inf_cl", 4096, 26.12, offload=True),
    Reported(_L, 32, "open_clip", 368, 64.13, offload=True),
    Reported(_L, 32, "inf_cl", 12288, 19.59, offload=True),
)
"""Memory of the loss on each device."""

PEAK_MEMORY = (
    *(Reported(_L, 8, "clip", k, gb) for k, gb in ((32, 46.40), (64, 77.94))),
    *(Reported(_L, 8, "open_clip", k, gb) for k, gb in ((32, 43.97), (64, 46.38), (128, 51.23))),
    *(Reported(_L, 8, "inf_cl", k, gb) for k, gb in ((32, 44.20), (64, 46.63), (128, 51.46), (256, 61.13))),
    *(
        Reported(_L, 8, "inf_cl", k, gb, offload=True)
        for k, gb in ((32, 42.40), (64, 42.49), (128, 42.69), (256, 43.07), (1024, 45.40))
    ),
    *(Reported(_L, 32, "clip", k, gb) for k, gb in ((32, 42.85), (64, 75.52))),
    *(Reported(_L, 32, "open_clip", k, gb) for k, gb in ((32, 42.46), (64, 43.06), (128, 44.26), (256, 46.71))),
    *(
        Reported(_L, 32, "inf_cl", k, gb)
        for k, gb in ((32, 42.48), (64, 43.08), (128, 44.30), (256, 46.71), (1024, 61.20))
    ),
)
"""Peak memory of a training step on each device."""


def _largest(
    model: str, devices: int, clip: int, open_clip: int, inf_cl: int, offload: bool = False
) -> tuple[Reported, ...]:
    return (
        Reported(model, devices, "clip", clip, clip, offload),
        Reported(model, devices, "open_clip", open_clip, open_clip, offload),
        Reported(model, devices, "inf_cl", inf_cl, inf_cl, offload),
    )


LARGEST_BATCH = (
    *_largest(_B, 8, 68, 172, 800),
    *_largest(_B, 32, 68, 360, 3456),
    *_largest(_L, 8, 64, 152, 448),
    *_largest(_L, 32, 64, 352, 2048),
    *_largest(_L, 8, 64, 184, 4096, offload=True),
    *_largest(_L, 32, 64, 368, 12288, offload=True),
)
"""Largest batch on 80 GB devices, in units of 1,024 pairs."""

ITERATION_SECONDS = (
    Reported(_L, 8, "clip", 64, 56.3),
    Reported(_L, 8, "open_clip", 64, 48.9),
    Reported(_L, 8, "inf_cl", 64, 49.4),
    Reported(_L, 8, "inf_cl", 256, 200.3),
)
