"""inf_cl, the package of the Inf-CL paper, and Contratile on two ranks: change an import.

    python examples/inf_cl_import.py             # 2 ranks with 2048 pairs each
    python examples/inf_cl_import.py 4096

Only the ring of inf_cl runs without a GPU. Prints time and memory of one rank before and after.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from compare import print_table
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import contratile as ct
from contratile.integrations.inf_cl import cal_ring_loss  # was: from inf_cl import cal_ring_loss

RANKS = 2


def clip_loss(cal_loss: Callable[..., Tensor], image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The symmetric loss, as in the README of inf_cl."""
    return (cal_loss(image, text, scale=scale) + cal_loss(text, image, scale=scale)) / 2


def on_rank(rank: int, folder: str, pairs: int) -> None:
    from inf_cl import cal_ring_loss as before

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    image, text = (F.normalize(torch.randn(pairs, 256), dim=1).requires_grad_() for _ in range(2))
    scale = torch.tensor(14.3, requires_grad=True)

    def step(loss: Callable[..., Tensor]) -> Tensor:
        value = loss(image, text, scale)
        torch.autograd.grad(value, (image, text, scale))
        return value.detach()

    steps = {
        "inf_cl": partial(step, partial(clip_loss, before)),
        "contratile": partial(step, partial(clip_loss, cal_ring_loss)),
        "contratile.clip_loss": partial(step, ct.clip_loss),  # both directions in one pass
    }
    print_table(f"{RANKS} ranks of {pairs} pairs", steps, verbose=rank == 0)
    old, new, _ = (float(step()) for step in steps.values())
    if rank == 0:
        print(f"loss before {old:.6f}, after {new:.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(pairs: int = 2048) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, (folder, pairs), nprocs=RANKS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
