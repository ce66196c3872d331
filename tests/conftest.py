"""Ends the ranks that tests started."""

from collections.abc import Iterator

import pytest

from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    close_pools()
