"""Outputs of a locked backbone, computed once over a source and kept for all epochs.

    table = kept_outputs(tower, source, "left", run, of=options, chunk=256, main=True, wait=barrier)
    table[chunk.index]                # what the backbone would give for a chunk

They are a file of the run, so a run that goes on does not compute them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contratile.data.loader import Loader
from contratile.data.rows import Rows
from contratile.data.sample import Broken, Indexed, Source
from contratile.train.evaluate import to_device
from contratile.train.towers import Tower

CHUNK = 256
"""Samples at a time, at most: larger ones are no faster where nothing is kept for a backward pass."""


def kept_outputs(
    tower: Tower,
    source: Source,
    side: str,
    run: Path,
    *,
    of: Mapping[str, Any],
    chunk: int,
    main: bool,
    wait: Callable[[], object],
    notify: Callable[[str], object] = lambda text: None,
) -> Tensor | None:
    """[samples, width] on the CPU. None for a stream, whose samples have no number: they are encoded every time.

    `of` are the options that the outputs depend on: a file of other ones is written anew.
    """
    if not isinstance(source, Indexed):
        return None
    path = run / f"kept-{side}.safetensors"
    same = json.dumps({"source": source.name, "length": len(source), **of})
    if main and not _fits(path, same):
        _write(path, _encode(tower, source, side, chunk, notify), same)
    wait()
    from safetensors.torch import load_file

    return load_file(path)["outputs"]


@torch.no_grad()
def _encode(tower: Tower, source: Indexed, side: str, chunk: int, notify: Callable[[str], object]) -> Tensor:
    device = next(tower.parameters()).device
    outputs: Tensor | None = None
    prepare = (tower.prepare, _nothing) if side == "left" else (_nothing, tower.prepare)
    order, done = encoding_order(source, side), 0
    for part in Loader.ordered(Rows(source, order), prepare, chunk=min(chunk, CHUNK)):
        inputs = part.left if side == "left" else part.right
        found = tower.backbone(to_device(inputs, device)).float().cpu()
        if outputs is None:
            outputs = found.new_zeros(len(source), found.shape[1])
        outputs[[order[row] for row in part.index.tolist()]] = found
        done += len(found)
        notify(f"{side} features: {done:,} of {len(source):,}")
    assert outputs is not None, "a source without samples was refused before"
    return outputs


def encoding_order(source: Indexed, side: str) -> list[int]:
    """Short texts first, so that a chunk is not padded to the longest of all; others as they come."""
    order = list(range(len(source)))
    if source.kinds == ("text", "text"):
        order.sort(key=lambda row: _length(source, row, side))
    return order


def _length(source: Indexed, row: int, side: str) -> int:
    try:
        return len(getattr(source[row], side))
    except Broken:
        return 0


def _nothing(samples: list[object]) -> None:
    return None


def _fits(path: Path, same: str) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return bool((file.metadata() or {}).get("of") == same)
    except (OSError, SafetensorError):
        return False


def _write(path: Path, outputs: Tensor, same: str) -> None:
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    save_file({"outputs": outputs}, partial, metadata={"of": same})
    partial.replace(path)
