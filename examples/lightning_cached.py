"""Lightning with a gradient cache: `training_step` returns a loss whose `backward()` encodes chunk after chunk.

    python examples/lightning_cached.py

Pairs are two ways to write a number. Works with automatic optimisation, precision plugins and accumulation, which all
call `backward()` of what `training_step` returns.
"""

import math
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import contratile as ct

PAIRS, BATCH, CHUNK, EPOCHS = 512, 128, 32, 4


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device) / ids.shape[1]
        return F.normalize(self.layer(self.words(ids) * (1 + places.view(1, -1, 1))).flatten(1), dim=1)


class Pairs(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.cache = ct.GradCache((self.left, self.right), ct.ClipLoss(), CHUNK, keep_graphs=2)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss: Tensor = self.cache(*batch, logit_scale=self.log_scale.exp())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    digits = torch.randint(10, (PAIRS, 4))
    loader = DataLoader(TensorDataset(digits, digits.flip(1) + 10), batch_size=BATCH, shuffle=True)
    model = Pairs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers of the loader
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
    for step in range(0, len(model.losses), 4):
        print(f"step {step}: loss {model.losses[step]:.4f}")


if __name__ == "__main__":
    main()
