from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of ranks for all distributed tests."""
    ranks = Pool(16)
    yield ranks
    ranks.close()
