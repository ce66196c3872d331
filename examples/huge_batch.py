"""Batches whose activations do not fit: two transformers, with chunks kept on disk until the second pass.

    python examples/huge_batch.py                                # batches of 1,024 and 4,096 pairs, some minutes
    python examples/huge_batch.py --batches 65536 --chunk 256 --steps 0

Measures one step of each batch size, then trains with the first. Memory is that of one chunk for any batch size; only
the features, 1 KiB per pair, and their gradients grow.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from compare import cost
from torch import Tensor, nn
from torch.nn import functional as F

import contratile as ct

WORDS, LENGTH, WIDTH = 500, 16, 128


class Tower(nn.Module):
    """A small transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.layers(self.words(ids)).mean(1), dim=1)


def pairs(batch: int, chunk: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Texts and the same texts in another language. In practice this is a data loader."""
    generator = torch.Generator().manual_seed(seed)
    dictionary = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    for start in range(0, batch, chunk):
        text = torch.randint(WORDS, (min(chunk, batch - start), LENGTH), generator=generator)
        yield text, dictionary[text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="training steps with the first batch size")
    options = parser.parse_args()
    torch.manual_seed(0)
    towers = Tower(), Tower()
    log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    parameters = [p for tower in towers for p in tower.parameters()] + [log_scale]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3)
    cache = ct.GradCache(towers, ct.ClipLoss(), options.chunk, offload="disk")

    def step(batch: int, seed: int) -> Tensor:
        optimiser.zero_grad()
        loss: Tensor = cache.step(pairs(batch, options.chunk, seed), logit_scale=log_scale.exp())
        return loss

    step(2 * options.chunk, seed=0)  # starts the threads
    for batch in options.batches:
        spent = cost(lambda batch=batch: step(batch, seed=1))  # type: ignore[misc]
        print(f"batch {batch}: {spent.seconds:.1f} s, peak {spent.mib:.0f} MiB", flush=True)
    for number in range(options.steps):
        loss = step(options.batches[0], seed=2 + number)
        optimiser.step()
        print(f"step {number}: loss {loss.item():.4f}, scale {log_scale.exp().item():.2f}", flush=True)


if __name__ == "__main__":
    main()
