"""Plots of recorded rows.

    memory_png, time_png = draw(load_rows(Path("bench-loss/loss.json")), Path("bench-loss"))
    (family_png,) = draw(load_rows(Path("bench-family/family.json")), Path("bench-family"))
    (ring_png,) = draw(load_rows(Path("bench-ring/ring.json")), Path("bench-ring"))
    (cache_png,) = draw(load_rows(Path("bench-cache/cache.json")), Path("bench-cache"))
    (data_png,) = draw(load_rows(Path("bench-data/data.json")), Path("bench-data"))
    (plan_png,) = draw(load_rows(Path("bench-plan/plan.json")), Path("bench-plan"))

Every marker is a measurement. Lines that were not measured are dashed, and their label says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from contratile.bench.plots.cache import draw_cache
from contratile.bench.plots.data import draw_data
from contratile.bench.plots.family import draw_family
from contratile.bench.plots.loss import draw_loss
from contratile.bench.plots.nodes import draw_nodes
from contratile.bench.plots.plan import draw_plan
from contratile.bench.plots.ring import draw_ring
from contratile.bench.plots.scale import draw_scale
from contratile.bench.rows import Recording


def draw(recording: Recording[Any], folder: Path) -> tuple[Path, ...]:
    """Draw the plots of a recording: loss_memory.png and loss_time.png, or KIND.png.

    Args:
        recording: The rows.
        folder: Where the plots are written.

    Returns:
        The paths of the plots.
    """
    make: dict[str, Callable[[Recording[Any], Path], tuple[Path, ...]]]
    make = {
        "loss": draw_loss,
        "family": draw_family,
        "ring": draw_ring,
        "cache": draw_cache,
        "data": draw_data,
        "plan": draw_plan,
        "nodes": draw_nodes,
        "scale": draw_scale,
    }
    return make[recording.kind](recording, folder)
