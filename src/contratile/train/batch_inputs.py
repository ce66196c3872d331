"""What the gradient cache encodes in a step: the inputs of each chunk, with the encoder of each.

loss = run.cache(batch_inputs(run, batch), scale=scale)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from contratile.data.chunk_maker import negatives_side
from contratile.data.loader import Batch, Chunk
from contratile.errors import bad_value
from contratile.models.encoding import to_device
from contratile.models.locked import rows_of
from contratile.models.towers import Tower
from contratile.train.encoders import SIDES
from contratile.train.objective import pair_facts
from contratile.train.preparation import PreparedRun


def batch_inputs(run: PreparedRun, batch: Batch) -> Iterator[tuple[Any, ...]]:
    """Yield the encoder inputs and pair facts of each chunk. For a locked side: the kept outputs of its backbone.

    Args:
        run: The run that is trained.
        batch: This process's share of a global batch.

    Raises:
        ValueError: A chunk, or this process's share of the batch, has no readable sample.
    """
    device, ids = run.accelerator.device, run.config.loss.ids
    count = 0
    for count, chunk in enumerate(batch.chunks, 1):  # noqa: B007  # it is read after the loop
        left, right = (
            rows_of(run.kept[side], chunk.index, side, run.config.run.out) if side in run.kept else getattr(chunk, side)
            for side in SIDES
        )
        inputs = [(run.towers.left, left), (run.towers.right, right)]
        if chunk.negatives is not None:
            inputs.append((inputs[negatives_side(run.source)][0], chunk.negatives.inputs))
        inputs += _second_inputs(run, chunk)
        first, other, *more = (_arguments(tower, to_device(x, device)) for tower, x in inputs)
        yield first, other, pair_facts(chunk, ids), *more
    share = run.config.run.batch // run.accelerator.num_processes
    if count == 0 or (run.sharded and count < -(-share // run.chunk)):
        what = "chunk" if count else "share of a process"
        reasons = ", ".join(run.loader.broken)
        remedy = f"Repair the data ({reasons}), or raise --{'chunk' if count else 'batch'}."
        bad_value(f"step {run.step + 1}", expected=f"a readable sample in every {what}", got="none", remedy=remedy)


def _second_inputs(run: PreparedRun, chunk: Chunk) -> list[tuple[Tower, Any]]:
    """What the guide or the teacher encodes of a chunk."""
    if run.second is None or chunk.second is None:
        return []
    left, right, negatives = chunk.second
    sides = run.second.towers.left, run.second.towers.right
    hard = [] if negatives is None else [(sides[negatives_side(run.source)], negatives)]
    return [(sides[0], left), (sides[1], right), *hard]


def _arguments(tower: Tower, inputs: Any) -> Any:
    """What the cache calls a tower with. Tokens that must keep their padding are one argument, which is not cut."""
    whole = getattr(tower.prepare, "pad_fully", False)
    return (inputs,) if whole and isinstance(inputs, dict) else inputs
