"""Whether `GradCache(keep_graphs="auto", memory_limit=...)` stays within its limit: twenty settings, each in a new process.

    python benchmarks/cache_limit.py --out benchmarks/results/cache-limit
    python benchmarks/cache_limit.py --only 3 17 --out bench-limit

Settings differ in encoder, lengths, rows, chunks and limit. A process makes its encoder and texts, does two steps without
kept graphs, multiplies what the second took to get the limit, and does four steps with "auto", the first of which
measures a chunk. The peak is the kernel's: resident memory at its highest during a step minus resident memory before
it, so that it counts whatever an allocator holds. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
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
STEPS = 4


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
    Setting(*MINILM, "wordnet", 64, 8, 1.3),
    Setting(*MINILM, "wordnet", 64, 8, 2),
    Setting(*MINILM, "wordnet", 64, 16, 3),
    Setting(*MINILM, "wordnet", 96, 32, 1.5),
    Setting(*MINILM, "long-tailed", 48, 8, 1.4),
    Setting(*MINILM, "long-tailed", 48, 16, 2.5),
    Setting(*MINILM, "wordnet", 64, 64, 2, tokens=400),
    Setting(*MINILM, "equal", 48, 8, 3),
    Setting(128, 4, "wordnet", 256, 16, 1.3),
    Setting(128, 4, "wordnet", 256, 32, 1.5),
    Setting(128, 4, "wordnet", 256, 32, 3, dropout=0.0),
    Setting(128, 4, "long-tailed", 192, 16, 1.7),
    Setting(128, 4, "long-tailed", 192, 32, 2.5),
    Setting(128, 4, "equal", 192, 16, 1.3),
    Setting(128, 4, "equal", 192, 64, 2),
    Setting(128, 4, "wordnet", 256, 256, 2.2, tokens=1000),
    Setting(64, 2, "wordnet", 512, 32, 1.4),
    Setting(64, 2, "wordnet", 512, 64, 2, dropout=0.0),
    Setting(256, 3, "long-tailed", 96, 8, 1.6),
    Setting(256, 3, "equal", 96, 12, 4),
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
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point is not None:
        print(json.dumps(measured(SETTINGS[options.point])))
        return
    rows = []
    for number in options.only or range(len(SETTINGS)):
        command = [sys.executable, __file__, "--point", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"setting {number} failed:\n{done.stderr}")
        found = json.loads(done.stdout)
        setting = SETTINGS[number]
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
