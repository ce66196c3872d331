"""`contratile embed`: write the features of any data to disk."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.cli.run_data import add_options, opened, progress, run_guarded
from contratile.printable import printable


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile embed",
        description="Write the features of any data to a .npy or .parquet file, with a key for each row. Started again "
        "after an interruption, it continues. The processes of torchrun share the work.",
    )
    add_options(parser, "embed")
    parser.add_argument("--out", type=Path, required=True, help="what to write: NAME.npy or NAME.parquet")
    parser.add_argument(
        "--side",
        choices=("left", "right", "both"),
        default="left",
        help="what to encode: the left sides (images, first texts), the right ones, or both (default: left)",
    )
    return parser


def embed(argv: Sequence[str]) -> int:
    """Embed data.

    Args:
        argv: The words after `contratile embed`.

    Returns:
        The exit code.
    """
    options = parser().parse_args(argv)
    if missing("embed", TRAIN, "train"):
        return 1
    quiet_progress()
    return run_guarded("embed", lambda: _embed(options))


def _embed(options: Any) -> None:
    from contratile.data.sample import Indexed
    from contratile.embed.embed import embed_source

    towers, step, source, ranks, embedding = opened(options)
    total = f" of {min(len(source), options.limit or len(source)):,}" if isinstance(source, Indexed) else ""
    with progress(ranks.rank != 0) as show:
        found = embed_source(
            towers,
            source,
            options.out,
            side=options.side,
            run=options.run,
            step=step,
            ranks=ranks,
            notify=lambda done: show(f"embedding: {done * ranks.world:,}{total} samples"),
            **embedding,
        )
    if ranks.rank == 0:
        broken = f", {found.broken:,} broken ones left out" if found.broken else ""
        rows = f"{found.rows:,} rows of {found.width} features"
        print(f"{rows}{broken}, weights of step {step}: {printable(', '.join(map(str, found.files)))}")
