"""The batteries notice when a kernel is broken. All mutations take minutes; that each can be made is checked always."""

from pathlib import Path

import pytest

from tests.engine.kernels.mutate import MUTATIONS, Mutation, copy_with, judge


def test_every_mutation_can_be_made(tmp_path: Path) -> None:
    for number, mutation in enumerate(MUTATIONS):
        copy_with(mutation, tmp_path / str(number))
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert judge(mutation).caught_by is not None
