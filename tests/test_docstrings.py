"""Examples in docstrings are run."""

import doctest
from importlib import import_module

import pytest

MODULES = (
    "contratile.data.loader",
    "contratile.grad_cache.cache",
    "contratile.integrations.inf_cl",
    "contratile.integrations.lightly",
    "contratile.integrations.open_clip",
    "contratile.integrations.pytorch_metric_learning",
    "contratile.integrations.sentence_transformers.ranking",
    "contratile.mining.hard_negatives",
    "contratile.models.towers",
    "contratile.planner",
    "contratile.planner.candidates",
    "contratile.planner.gpus",
    "contratile.planner.kernel_time",
    "contratile.planner.library_time",
    "contratile.planner.step_time",
    "contratile.planner.table",
    "contratile.planner.tile_time",
    "contratile.printable",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted and not result.failed
