"""One rank of the test of GradCache under DeepSpeed: an engine's step against DDP's, from the same weights.

torchrun --nproc-per-node 2 -m tests.grad_cache.deepspeed_rank STAGE
"""

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import contratile as ct
from tests.grad_cache.towers import Tower, padded, twins

RATE = 0.5


def inputs_of(rank: int, stage: int) -> tuple[Any, Any]:
    """Uneven numbers of chunks, except under ZeRO 3, where forward passes are collective."""
    rows = (14, 13) if stage == 3 else (14, 6)
    return padded(rows[rank], 10 + rank), padded(rows[rank], 20 + rank)


def weights(module: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            found[name] = p.detach().clone().float()
    return found


def main() -> None:
    stage = int(sys.argv[1])
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    ours, theirs = twins(Tower(1, dropout=0.1))
    before = weights(theirs[0], 0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the default clips at norm 1
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=ours[0], model_parameters=ours[0].parameters(), config=config)
    ddp = DistributedDataParallel(theirs[0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    lengths = ct.ByLength(overhead=None)  # the chunks that ZeRO 3 gets, so that dropout draws the same
    caches = [ct.GradCache(x, ct.ClipLoss(), 4, lengths=lengths) for x in (engine, ddp)]
    for _ in range(2):
        values = []
        for cache, stepper in zip(caches, (engine, optimizer), strict=True):
            torch.manual_seed(rank)
            values.append(cache.step(*inputs_of(rank, stage), logit_scale=5.0))
            stepper.step()
        optimizer.zero_grad()
        torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-6)
    got, want = weights(engine.module, stage), weights(theirs[0], 0)
    moved = max(float((want[name] - before[name]).abs().max()) for name in want)
    gap = max(float((got[name] - want[name]).abs().max()) for name in want)
    print(f"rank {rank}: moved {moved:.3g}, gap {gap / moved:.3g}", flush=True)
    assert moved > 1e-3 and gap <= 1e-6 * moved, (moved, gap)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
