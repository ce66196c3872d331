"""Retrieval training as in tevatron, with Hugging Face's `Trainer` and a gradient cache: batches of any size.

    python examples/hf_trainer_cached.py

The trainer needs one method: `compute_loss` returns a loss whose `backward()` runs the cache. A query comes with one
positive passage and several hard negatives; passages of all queries are negatives too. One encoder serves both, so
that texts of similar length share a chunk. It is a small BERT with random weights; nothing is downloaded.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import contratile as ct

PAIRS, BATCH, STEPS, PASSAGES, CHUNK, WORDS = 1024, 32, 32, 2, 16, 400


class Encoder(nn.Module):
    """Encodes texts; the trainer wraps it in DDP if there are several processes."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS + 1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(2).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def retrieval_loss(query: Tensor, passage: Tensor) -> Tensor:
    """Passage `i * PASSAGES` is the positive of query `i`; with several processes passages of all are negatives."""
    labels = torch.arange(len(query), device=query.device) * PASSAGES
    return ct.info_nce(query, passage, 20.0, labels=labels)


class CachedTrainer(Trainer):
    """A trainer whose batches go through the encoder in chunks."""

    cache: ct.GradCache | None = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        if self.cache is None:
            self.cache = ct.GradCache(model, retrieval_loss, CHUNK, keep_graphs=2)
        loss: Tensor = self.cache(inputs["query"], inputs["passage"])
        return loss


def text(start: int, length: int) -> list[int]:
    return [1 + (start + at) % WORDS for at in range(length)]


def collate(rows: list[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """As tevatron does: all queries, and all passages, each padded to its longest."""

    def padded(texts: list[list[int]]) -> dict[str, Tensor]:
        longest = max(map(len, texts))
        ids = torch.tensor([x + [0] * (longest - len(x)) for x in texts])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    return {
        "query": padded([row["query"] for row in rows]),
        "passage": padded([x for row in rows for x in row["passages"]]),
    }


def main() -> None:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    starts, lengths = (torch.randint(most, (PAIRS,), generator=draw).tolist() for most in (WORDS, 20))
    data = [
        {"query": text(at, 3 + n // 4), "passages": [text(at, 4 + n), *(text(at + 100, 4 + n),) * (PASSAGES - 1)]}
        for at, n in zip(starts, lengths, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=5e-3,
            logging_steps=8,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = CachedTrainer(model=Encoder(), args=arguments, train_dataset=data, data_collator=collate)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.4f}")
    assert trainer.cache is not None
    print(f"padding: {trainer.cache.padding}")


if __name__ == "__main__":
    main()
