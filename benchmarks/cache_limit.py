"""Whether `GradCache(keep_graphs="auto", memory_limit=...)` stays within its limit: twenty settings, twenty processes.

    python benchmarks/cache_limit.py --out benchmarks/results/cache-limit
    python benchmarks/cache_limit.py --only 3 17 --out bench-limit

Settings differ in encoder, lengths, rows, chunks and limit. A process makes its encoder and texts, does two steps
without kept graphs, multiplies what the second took to get the limit, and does three steps with "auto", the first of
which measures a chunk. The peak is the kernel's: resident memory at its highest during a step minus resident memory
before it, so that it counts whatever an allocator holds. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from contratile import GradCache
from contratile.bench.contestants.cache import our_loss
from contratile.bench.contestants.cache_model import TOKENS, Encoder
from contratile.bench.contestants.cache_texts import LONGEST, Lengths, make_texts
from contratile.host_memory import peak_growth
from contratile.machine import environment

MiB = 1 << 20
STEPS = 3


@dataclass(frozen=True)
class Setting:
    """An encoder, a batch and a limit."""

    width: int
    layers: int
    lengths: Lengths
    pairs: int
    chunk: int
    room: float
    """The limit, in units of what a step without kept graphs takes."""

    dropout: float = 0.1
    tokens: int | None = None
    """Chunks by tokens instead of rows."""


MINILM = (384, 6)
SETTINGS = (
    Setting(*MINILM, "wordnet", 24, 4, 1.3),
    Setting(*MINILM, "wordnet", 24, 4, 2),
    Setting(*MINILM, "wordnet", 24, 6, 3),
    Setting(*MINILM, "wordnet", 32, 8, 1.5),
    Setting(*MINILM, "long-tailed", 16, 2, 1.4),
    Setting(*MINILM, "long-tailed", 16, 4, 2.5),
    Setting(*MINILM, "wordnet", 24, 24, 2, tokens=120),
    Setting(*MINILM, "equal", 16, 4, 3),
    Setting(128, 4, "wordnet", 128, 16, 1.3),
    Setting(128, 4, "wordnet", 128, 32, 1.5),
    Setting(128, 4, "wordnet", 128, 16, 3, dropout=0.0),
    Setting(128, 4, "long-tailed", 96, 8, 1.7),
    Setting(128, 4, "long-tailed", 96, 16, 2.5),
    Setting(128, 4, "equal", 96, 8, 1.3),
    Setting(128, 4, "equal", 96, 16, 2),
    Setting(128, 4, "wordnet", 128, 128, 2.2, tokens=500),
    Setting(64, 2, "wordnet", 512, 32, 1.4),
    Setting(64, 2, "wordnet", 512, 64, 2, dropout=0.0),
    Setting(256, 3, "long-tailed", 48, 4, 1.6),
    Setting(256, 3, "equal", 48, 6, 4),
)


def measured(setting: Setting) -> dict[str, Any]:
    """Growth of this process in the steps, and what was kept in the last one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    longest = TOKENS if setting.lengths == "equal" else LONGEST
    encoder = Encoder(setting.width, setting.layers, dropout=setting.dropout, longest=longest)
    sides = [make_texts(setting.pairs, setting.lengths, seed=seed) for seed in (1, 2)]
    how: dict[str, Any] = {"chunk_size": setting.chunk, "chunk_tokens": setting.tokens}
    plain = GradCache(encoder, our_loss, **how)
    plain.step(*sides)  # gradients exist from here on
    taken = peak_growth(lambda: plain.step(*sides)) or 0
    limit = int(setting.room * taken)
    cache = GradCache(encoder, our_loss, **how, keep_graphs="auto", memory_limit=limit)
    growth = [peak_growth(lambda: cache.step(*sides)) for _ in range(STEPS)]
    if None in growth:
        raise SystemExit("resident memory: expected Linux, which tells its peak, got another system.")
    known = cache.feed.agenda(tuple(sides)).known
    peaks = [round((x or 0) / MiB, 1) for x in growth]
    return {
        "plain_mib": round(taken / MiB, 1),
        "limit_mib": round(limit / MiB, 1),
        "peak_mib": max(peaks),
        "first_step_mib": peaks[0],
        "kept": cache.kept_chunks,
        "chunks": len(known or ()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-limit"), help="folder for cache-limit.json")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of settings; default: all")
    options = parser.parse_args()
    rows = []
    for number in options.only or range(len(SETTINGS)):
        setting = SETTINGS[number]
        with get_context("fork").Pool(1) as one:  # this process has imported, and done nothing else
            found = one.apply(measured, (setting,))
        rows.append({"setting": number, **asdict(setting), **found, "within": found["peak_mib"] <= found["limit_mib"]})
        print(
            f"{number:2}: {found['limit_mib']:6.1f} MiB allowed, {found['peak_mib']:6.1f} taken "
            f"(first step {found['first_step_mib']:.1f}, without kept graphs {found['plain_mib']:.1f}), "
            f"{found['kept']} of {found['chunks']} graphs kept",
            flush=True,
        )
    torch.set_num_threads(1)
    within = sum(row["within"] for row in rows)
    print(f"{within} of {len(rows)} within their limit")
    command_line = f"python benchmarks/cache_limit.py --out benchmarks/results/{options.out.name}"
    content = {"kind": "cache-limit", "command": command_line, "environment": environment(), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    draft = options.out / ".cache-limit.json.part"
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draft.replace(options.out / "cache-limit.json")
    if within < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
