"""Any data, opened with the options of a run: sizes of icons, the held-out share.

source = run_source(config.data, {"data": "photos/"}, split="all")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contratile.data.catalog import DataConfig, open_source
from contratile.data.sample import Indexed, Stream

ALONE: dict[str, Any] = {
    **{"test_data": "", "data_weights": (), "batching": "mixed", "samples_per_epoch": 0},
    **{"limit": 0, "negatives": (), "num_negatives": 0, "left_kind": "auto"},
}
"""Options of the run's own data that mean nothing for other data."""


def run_source(config: DataConfig, given: Mapping[str, Any], *, split: str) -> Indexed | Stream:
    """Open other data than the run's own.

    Args:
        config: The data options of the run.
        given: Options that name the other data: data, left, right, root and so on.
        split: "all", or the pairs that the run would train on ("train") or hold out ("test").
    """
    data = replace(config, **ALONE, **given)
    if split == "all":  # with separate test data nothing is held out
        data = replace(data, test_data=data.data)
    return open_source(data, "test" if split == "test" else "train")
