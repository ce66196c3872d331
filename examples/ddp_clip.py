"""Two towers with DDP: the loss is over the pairs of all ranks, and gradients equal those of one process.

    torchrun --nproc_per_node 2 examples/ddp_clip.py
    python examples/ddp_clip.py                        # one process: the same code

The last line compares the parameters with those of a single process that saw the whole batch.
"""

import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import contratile as ct

BATCH, FEATURES, WIDTH, STEPS = 2048, 32, 16, 5


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        return image, text, self.log_scale.exp()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(STEPS, BATCH, FEATURES, generator=generator)
    noise = torch.randn(2, STEPS, BATCH, FEATURES, generator=generator)
    return list(zip(common + 0.5 * noise[0], common + 0.5 * noise[1], strict=True))


def train(model: nn.Module, rank: int, world: int, *, verbose: bool) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (images, texts) in enumerate(batches()):
        mine = slice(rank, None, world)  # every world-th pair
        loss = ct.clip_loss(*model(images[mine], texts[mine]), group="auto" if world > 1 else None)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if verbose:
            value = loss.detach().clone()
            if world > 1:
                dist.all_reduce(value)  # the mean over ranks is the global mean loss
            if rank == 0:
                print(f"step {step}: loss {value.item() / world:.4f}", flush=True)


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    model = Towers()
    train(DistributedDataParallel(model) if world > 1 else model, rank, world, verbose=True)

    alone = Towers()
    train(alone, 0, 1, verbose=False)
    gap = max((x - y).abs().max().item() for x, y in zip(model.parameters(), alone.parameters(), strict=True))
    if rank == 0:
        print(f"{world} rank{'s' * (world > 1)} against one process: parameters differ by at most {gap:.1e}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
