"""Outputs of a locked backbone, computed once for a whole source and reused in every epoch.

    outputs = kept_outputs(tower, source, "left", run, of=options, chunk=256, main=True, wait=barrier)
    rows_of(outputs, chunk.index, "left", run)       # what the backbone would return for a chunk

They are stored in the run's folder, so that a resumed run does not compute them again. Broken samples have no outputs;
training skips them too.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contratile.data.files import usual_mode, written_whole
from contratile.data.loader import BROKEN_LIMIT, Loader
from contratile.data.rows import Subset
from contratile.data.sample import Broken, Indexed, Source
from contratile.errors import bad_value
from contratile.models.encoding import to_device
from contratile.models.towers import Tower

CHUNK = 256
"""Maximum number of samples at a time: without a backward pass larger chunks are not faster."""


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
    broken_limit: float = BROKEN_LIMIT,
    notify: Callable[[str], object] = lambda text: None,
    say: Callable[[str], object] = lambda text: None,
) -> Tensor | None:
    """Load the outputs of a locked backbone for all samples of a source, computing them first if needed.

    Args:
        tower: The locked tower.
        source: Its samples.
        side: "left" or "right": the side that the tower encodes.
        run: The run's folder, where the outputs are stored.
        of: Options that the outputs depend on. A file that was written with others is replaced.
        chunk: Samples to encode at a time.
        main: Whether this is the main process, which computes and writes them.
        wait: A barrier for all processes.
        broken_limit: How many samples may be broken, as in training. Their rows are NaN; see `rows_of`.
        notify: Called with progress messages.
        say: Called with a message if samples were left out.

    Returns:
        A tensor [samples, width] on the CPU; None for a stream, whose samples have no index and are encoded every time.
    """
    if not isinstance(source, Indexed):
        return None
    path = _path(run, side)
    same = json.dumps({"source": source.name, "length": len(source), **of})
    if main and not _fits(path, same):
        broken: Counter[str] = Counter()
        options = {"chunk": min(chunk, CHUNK), "broken_limit": broken_limit, "broken": broken}
        _write(path, _encode(tower, source, side, options, notify), same)
        if broken:
            say(f"{side} features: {broken.total():,} broken samples of {source.name} left out ({', '.join(broken)})")
    wait()
    from safetensors.torch import load_file

    return load_file(path)["outputs"]


def rows_of(outputs: Tensor, index: Tensor, side: str, run: Path) -> Tensor:
    """The stored outputs of the samples at `index`.

    Raises:
        ValueError: One of them was broken when the outputs were computed, and can be read now.
    """
    found = outputs[index]
    if bool(found[:, :1].isnan().any()):
        remedy = f"A sample that was broken when they were computed can be read now: delete {_path(run, side)}."
        bad_value(f"kept {side} features", expected="those of every sample of the chunk", got="NaN", remedy=remedy)
    return found


def _path(run: Path, side: str) -> Path:
    return run / f"kept-{side}.safetensors"


@torch.no_grad()
def _encode(
    tower: Tower, source: Indexed, side: str, options: dict[str, Any], notify: Callable[[str], object]
) -> Tensor:
    device = next(tower.parameters()).device
    outputs: Tensor | None = None
    prepare = (tower.prepare, _Nothing()) if side == "left" else (_Nothing(), tower.prepare)
    order, done = encoding_order(source, side), 0
    for part in Loader.ordered(Subset(source, order), prepare, **options):
        inputs = part.left if side == "left" else part.right
        found = tower.backbone(to_device(inputs, device)).float().cpu()
        if outputs is None:
            outputs = found.new_full((len(source), found.shape[1]), math.nan)
        outputs[[order[row] for row in part.index.tolist()]] = found
        done += len(found)
        notify(f"{side} features: {done:,} of {len(source):,}")
    if outputs is None:
        reasons = ", ".join(options["broken"])
        bad_value(source.name, expected="samples to train on", got="none", remedy=f"All are broken: {reasons}.")
    return outputs


def encoding_order(source: Indexed, side: str) -> list[int]:
    """Texts by length, so that chunks need little padding; images in the source's order."""
    order = list(range(len(source)))
    if source.kinds == ("text", "text"):
        order.sort(key=lambda row: _length(source, row, side))
    return order


def _length(source: Indexed, row: int, side: str) -> int:
    try:
        return len(getattr(source[row], side))
    except Broken:
        return 0


class _Nothing:
    """The `prepare` of the side that is not encoded."""

    edge = 1  # the loader shrinks its images to one pixel, so that they take no memory

    def __call__(self, samples: list[object]) -> None:
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

    with written_whole(path) as draft, usual_mode(draft):
        save_file({"outputs": outputs}, draft, metadata={"of": same})
