"""Two towers with Hugging Face's `Trainer`: the model's forward returns the loss, and the trainer does the rest.

    python examples/hf_trainer.py

The towers are small BERTs with random weights; nothing is downloaded. Pairs are two ways to write a number. Started
with `torchrun`, the same model uses negatives of all ranks.
"""

import math
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import contratile as ct

DIGITS, WIDTH, PAIRS, BATCH, STEPS = 4, 32, 2048, 128, 24


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=20,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=2 * DIGITS,
            hidden_dropout_prob=0.0,
        )
        self.left, self.right = BertModel(config), BertModel(config)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        left, right = (
            F.normalize(tower(input_ids=ids).last_hidden_state.mean(1), dim=1)
            for tower, ids in ((self.left, left), (self.right, right))
        )
        return {"loss": ct.clip_loss(left, right, self.log_scale.exp())}


def pairs() -> list[dict[str, Tensor]]:
    """The digits of a number, and the same digits backwards with other token ids."""
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(10, (PAIRS, DIGITS), generator=generator)
    return [{"left": row, "right": row.flip(0) + 10} for row in digits]


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=3e-3,
            logging_steps=6,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(model=TwoTowers(), args=arguments, train_dataset=pairs())
        trainer.train()
    batch = BATCH * arguments.world_size
    log = trainer.state.log_history if trainer.is_world_process_zero() else []
    for entry in log:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.4f} (log N = {math.log(batch):.4f})")


if __name__ == "__main__":
    main()
