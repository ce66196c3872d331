"""`contratile export`: write a trained model as a folder that another package loads."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.printable import printable


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile export",
        description="Write the model of a run as a folder that transformers, open_clip or sentence-transformers loads "
        "without Contratile: safetensors, tokenizer, preprocessing and a model card. The folder is loaded again and "
        "compared with the run before it gets its name.",
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--to",
        required=True,
        choices=("transformers", "open_clip", "sentence-transformers"),
        help="the package: transformers for tiny and hf:, open_clip for open_clip:, sentence-transformers for st:",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--weights",
        default="best",
        help="the checkpoint to export: best, last or a step such as step-00000100 (default: best)",
    )
    return parser


def export(argv: Sequence[str]) -> int:
    """Export a run.

    Args:
        argv: The words after `contratile export`.

    Returns:
        The exit code.
    """
    options = parser().parse_args(argv)
    if missing("export", TRAIN, "train"):
        return 1
    quiet_progress()
    from contratile.train.export import export_run

    exported, step = export_run(options.run, options.to, options.out, options.weights)
    print(printable(f"{options.out}: weights of step {step}, for {exported.loaded_by} of {options.to}"))
    for note in exported.notes:
        print(f"note: {note}")
    print("README.md shows how to load it. Fill in its license field before you share it.")
    return 0
