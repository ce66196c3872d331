"""A `SentenceTransformerTrainer` run with sentence-transformers' cached loss and with Contratile's: change an import.

    python examples/sentence_transformers_cached.py                      # a few minutes on two cores
    python examples/sentence_transformers_cached.py --quick

Batches are encoded in mini-batches, so memory does not grow with the batch. Prints both loss curves, then time and
memory of both runs. Model and pairs are those of `sentence_transformers_trainer.py`.
"""

import argparse
from functools import partial
from pathlib import Path

# First, because it sets HF_HUB_OFFLINE.
from sentence_transformers_trainer import no_progress_bars, pairs, print_costs, print_curves, run  # isort: skip

from compare import Cost
from sentence_transformers.sentence_transformer import losses as theirs

from contratile.integrations import sentence_transformers as ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps and a smaller batch")
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's data files")
    options = parser.parse_args()
    steps, batch, mini_batch = (2, 12, 4) if options.quick else (5, 256, 32)
    no_progress_bars()

    source, data = pairs(options.wordnet, 500 if options.quick else 5000)
    print(f"{len(data):,} pairs from {source}; batches of {batch} in mini-batches of {mini_batch}")
    curves: list[list[float]] = []
    costs: list[Cost] = []
    makers = (
        partial(theirs.CachedMultipleNegativesRankingLoss, mini_batch_size=mini_batch),
        # Sorting texts by length is faster, but draws other dropout masks: off, so that the curves can be compared.
        partial(ours.CachedMultipleNegativesRankingLoss, mini_batch_size=mini_batch, lengths="off"),
    )
    for make in makers:
        curve, cost = run(make, data, steps=steps, batch=batch)
        curves.append(curve)
        costs.append(cost)
    gap = print_curves(*curves)
    print_costs({f"fastest of {steps} steps, {batch} pairs": costs})
    print(f"\nthe curves differ by at most {gap:.1e}")


if __name__ == "__main__":
    main()
