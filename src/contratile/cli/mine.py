"""`contratile mine`: hard negatives of any data, as a table that `contratile train` reads."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.cli.run_data import add_options, check_views, opened, progress, run_guarded
from contratile.printable import printable


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile mine",
        description="Find hard negatives: for each left side, texts that score high and do not belong to it. The table "
        "has all pairs with a list of negatives; train on it with `contratile train --data`. The rules and their "
        "defaults are those of sentence-transformers. The processes of torchrun share the work.",
    )
    add_options(parser, "mine")
    parser.add_argument("--out", type=Path, required=True, help="table to write: NAME.jsonl or NAME.parquet")
    parser.add_argument("--num-negatives", type=int, default=5, help="negatives per pair (default: 5)")
    parser.add_argument(
        "--range-min", type=int, default=0, help="skip this many of the best texts that pass the rules (default: 0)"
    )
    parser.add_argument(
        "--range-max",
        type=int,
        help="use only this many of them (default: enough for --num-negatives, 10 times as "
        "many with a margin or --max-score)",
    )
    parser.add_argument("--absolute-margin", type=float, help="skip texts that score above positive score - margin")
    parser.add_argument(
        "--relative-margin", type=float, help="skip texts that score above positive score - margin * |positive score|"
    )
    parser.add_argument("--min-score", type=float, help="skip texts that score lower")
    parser.add_argument("--max-score", type=float, help="skip texts that score higher")
    parser.add_argument(
        "--sampling",
        choices=("top", "random"),
        default="top",
        help="take the best of the remaining texts, or draw from them (default: top)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --sampling random (default: 0)")
    parser.add_argument("--scores", action="store_true", help="add a column of scores: the positive's, then the others")
    return parser


def mine(argv: Sequence[str]) -> int:
    """Mine hard negatives.

    Args:
        argv: The words after `contratile mine`.

    Returns:
        The exit code.
    """
    options = parser().parse_args(argv)
    if missing("mine", TRAIN, "train"):
        return 1
    quiet_progress()
    return run_guarded("mine", lambda: _mine(options))


def _mine(options: Any) -> None:
    from dataclasses import fields

    from contratile.embed.mine import mine_source
    from contratile.mining.options import Rules

    rules = Rules(**{field.name: getattr(options, field.name) for field in fields(Rules)})
    towers, step, source, ranks, embedding = opened(options)
    check_views(towers, options.run)
    with progress(ranks.rank != 0) as show:
        found = mine_source(
            towers, source, options.out, rules, scores=options.scores, ranks=ranks, notify=show, **embedding
        )
    if found is None:
        return
    broken = f", {found.broken:,} broken samples left out" if found.broken else ""
    print(f"{found.pairs:,} pairs of {found.queries:,} left sides and {found.keys:,} texts{broken}")
    print(f"{found.negatives:,} hard negatives, weights of step {step}: {printable(str(options.out))}")
    if found.negatives:
        print(f"mean score where there are negatives: positives {found.positive:.4f}, negatives {found.negative:.4f}")
    if found.short:
        none = f", {found.none:,} of them none" if found.none else ""
        remedy = "raise --range-max or relax the rules"
        print(f"{found.short:,} left sides have fewer than {rules.num_negatives}{none}; {remedy}")
