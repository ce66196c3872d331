"""The paper's package and Contratile on two ranks: users of `inf_cl` change an import.

    python examples/inf_cl_import.py             # 2 ranks of 2048 pairs
    python examples/inf_cl_import.py 4096

The package's ring is the part of it that runs without a GPU. Prints what one rank needs before and after.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import contratile as ct
from contratile.bench.before_after import print_table
from contratile.bench.contestants.loss import LossProblem, backward, quiet
from contratile.integrations.inf_cl import cal_ring_loss  # was: from inf_cl import cal_ring_loss

RANKS = 2


def clip_loss(cal_loss: Callable[..., Tensor], image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """As in the package's README."""
    return (cal_loss(image, text, scale=scale) + cal_loss(text, image, scale=scale)) / 2


def on_rank(rank: int, folder: str, pairs: int) -> None:
    with quiet():
        from inf_cl import cal_ring_loss as before

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    problem = LossProblem.make(pairs, 256, scale=14.3, seed=rank)

    steps = {
        "inf_cl": problem.bind(backward(partial(clip_loss, before))),
        "contratile": problem.bind(backward(partial(clip_loss, cal_ring_loss))),
        "contratile.clip_loss": problem.bind(backward(ct.clip_loss)),  # both directions from one pass
    }
    print_table(f"{RANKS} ranks of {pairs} pairs", steps, quiet=rank != 0)
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
