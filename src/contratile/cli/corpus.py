"""What `contratile search` and `contratile serve` search, as arguments."""

import argparse
from pathlib import Path


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add the run or embedded features to search, and where their encoders and pictures are."""
    parser.add_argument(
        "corpus",
        type=Path,
        metavar="RUN|EMBEDDED",
        help="folder of a finished run; or the --out of `contratile embed`, or a folder that contains one",
    )
    parser.add_argument(
        "--run",
        type=Path,
        help="run that embedded the features, if it has moved; its weights must be unchanged",
    )
    parser.add_argument(
        "--pictures",
        metavar="DATA",
        help="data to read the pictures of embedded features from, named as for `contratile embed` (default: the data "
        "that you embedded, if it is still there)",
    )
