"""`contratile eval`: metrics of a trained pair of encoders on any data."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contratile.cli.extras import TRAIN, missing


def parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(
        prog="contratile eval", description="Retrieval metrics, and zero-shot classification if class names are given."
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--data", help="other data than the run's held-out pairs, named as in `contratile train`")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="of the data (default: test)")
    parser.add_argument("--classes", type=Path, help="a file with one class name per line: zero-shot classification")
    parser.add_argument("--templates", type=Path, help="a file with one prompt per line, {} stands for the name")
    parser.add_argument("--limit", type=int, default=0, help="pairs at most (default: all)")
    parser.add_argument("--chunk", type=int, default=256, help="pairs that are encoded at once (default: 256)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def evaluate(argv: Sequence[str]) -> int:
    """Metrics of a trained pair of encoders on any data."""
    options = parser().parse_args(argv)
    if missing("eval", TRAIN, "train"):
        return 1
    try:
        metrics = _evaluate(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"contratile eval: {error}", file=sys.stderr)
        return 2
    import json

    if options.json:
        print(json.dumps(metrics))
    else:
        for name, value in metrics.items():
            print(f"{name:28} {value:.4f}")
    return 0


def _evaluate(options: Any) -> dict[str, float]:
    from dataclasses import replace

    from contratile.data.catalog import open_source
    from contratile.train.evaluate import TEMPLATES, encode, retrieval, zero_shot
    from contratile.train.finish import load_run
    from contratile.train.loop import check_kinds

    towers, config = load_run(options.run)
    data = config.data if options.data is None else replace(config.data, data=options.data, test_data="")
    source = open_source(data, options.split)
    check_kinds(source, towers.kinds)
    found = encode(towers, source, chunk=options.chunk, limit=options.limit)
    metrics = {"pairs": float(len(found.keys)), **retrieval(found)}
    if options.classes is not None:
        names = lines(options.classes)
        metrics |= zero_shot(towers, found, names, lines(options.templates) if options.templates else TEMPLATES)
    return metrics


def lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
