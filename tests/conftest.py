"""Session-wide set-up of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("tests.harness")
pytest_plugins = ["tests.budget"]

from tests.harness import close_pool, end_shared_workers  # noqa: E402

# The machine's cores belong to the workers, and one thread makes sums come out alike everywhere.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def fresh_workers_for_each_file() -> Iterator[None]:
    """What a test finds in shared workers depends on its file alone."""
    yield
    end_shared_workers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pool()
