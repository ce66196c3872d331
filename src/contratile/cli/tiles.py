"""`contratile tiles`: the tile plan for a problem on this machine, in pure integers."""

import argparse
from collections.abc import Sequence

from contratile.tiles import MiB, plan_tiles


def parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(
        prog="contratile tiles",
        description="Print how N x M scores over D features are cut into tiles on this machine.",
    )
    parser.add_argument("--n", type=_positive, required=True, help="queries")
    parser.add_argument("--m", type=_positive, help="keys (default: as many as queries)")
    parser.add_argument("--d", type=_positive, required=True, help="features")
    parser.add_argument("--tile", type=_positive, help="force this many rows and columns per tile")
    parser.add_argument("--itemsize", type=int, choices=(4, 8), default=4, help="bytes of a score (default: 4)")
    parser.add_argument("--symmetric", action="store_true", help="queries are the keys: upper triangle only")
    return parser


def tiles(argv: Sequence[str]) -> int:
    """Print the plan, and what it saves."""
    options = parser().parse_args(argv)
    m = options.m or options.n
    if options.symmetric and m != options.n:
        parser().error(f"--symmetric: expected as many keys as queries, got --n {options.n} --m {m}")
    plan = plan_tiles(
        options.n, m, options.d, tile=options.tile, itemsize=options.itemsize, symmetric=options.symmetric
    )
    print(plan)
    print(f"all scores at once would take {plan.n * plan.m * plan.itemsize / MiB:.1f} MiB")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text}")
    return value
