"""`contratile tiles`: the tile plan of a problem on this machine."""

import argparse
from collections.abc import Sequence
from math import ceil

from contratile.cli.options import Parser
from contratile.engine import tuned
from contratile.engine.plan import MiB, plan_tiles

MOST = 10_000_000
"""More tiles than this would take minutes to count."""


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = Parser(
        prog="contratile tiles",
        description="Show how N x M scores of D-dimensional features are cut into tiles on this machine, and what the "
        "whole score matrix would take.",
    )
    parser.add_argument("--n", type=_positive, required=True, help="number of queries")
    parser.add_argument("--m", type=_positive, help="number of keys (default: as many as queries)")
    parser.add_argument("--d", type=_positive, required=True, help="feature size")
    parser.add_argument("--tile", type=_positive, help="use this many rows and columns per tile")
    parser.add_argument("--itemsize", type=int, choices=(4, 8), default=4, help="bytes per score (default: 4)")
    parser.add_argument("--symmetric", action="store_true", help="the keys are the queries: upper triangle only")
    return parser


def tiles(argv: Sequence[str]) -> int:
    """Print the plan, and the size of the whole score matrix."""
    options = parser().parse_args(argv)
    m = options.m or options.n
    if options.symmetric and m != options.n:
        parser().error(f"--symmetric: expected as many keys as queries, got --n {options.n} --m {m}")
    shape = None if options.tile or options.symmetric else tuned.tiles(options.d, options.itemsize)
    plan = plan_tiles(
        options.n, m, options.d, tile=options.tile, itemsize=options.itemsize, symmetric=options.symmetric, shape=shape
    )
    if ceil(plan.n / plan.rows) * ceil(plan.m / plan.cols) > MOST:
        parser().error(f"expected at most {MOST:,} tiles, got more. Lower --n, --m or --d, or raise --tile")
    print(plan)
    if shape is not None:
        print("tiles as tuned by `contratile doctor --tune`, for one process")
    print(f"all scores at once would take {plan.n * plan.m * plan.itemsize / MiB:.1f} MiB")
    return 0


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 16 else 0
    if not 0 < value < 1 << 40:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {(1 << 40) - 1}, got {text[:40]}")
    return value
