"""SimCLR as a LightningModule: two noisy views of each image, and `nt_xent` in the training step.

    python examples/lightning_simclr.py

Images are random, nothing is downloaded. With `Trainer(devices=..., strategy="ddp")` the same code uses the views of
all devices, because `group="auto"` finds the process group.
"""

import math
import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import contratile as ct

IMAGES, SIZE, BATCH, EPOCHS = 1024, 16, 256, 4


class SimCLR(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.LazyLinear(32)
        self.curve: list[float] = []

    def embed(self, images: Tensor) -> Tensor:
        view = images.roll(int(torch.randint(3, ())), dims=-1) + 0.3 * torch.randn_like(images)
        return F.normalize(self.head(self.encoder(view)), dim=1)

    def training_step(self, images: Tensor) -> Tensor:
        loss = ct.nt_xent(self.embed(images), self.embed(images), temperature=0.2)
        self.curve.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    model = SimCLR()
    model.embed(torch.zeros(2, 3, SIZE, SIZE))  # initialises the lazy layer
    blurred = F.interpolate(torch.randn(IMAGES, 3, 4, 4), size=SIZE, mode="bilinear")
    images: DataLoader[Tensor] = DataLoader(list(blurred), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="auto",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, images)
    views = 2 * BATCH * trainer.world_size
    for step in range(0, len(model.curve), 5) if trainer.is_global_zero else ():
        print(f"step {step}: loss {model.curve[step]:.4f} (log(2N - 1) = {math.log(views - 1):.4f})")


if __name__ == "__main__":
    main()
