"""Session-wide set-up of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("tests.harness")
pytest_plugins = ["tests.budget"]

from tests.harness import close_pool, end_shared_workers  # noqa: E402
from tests.threads import THREADS  # noqa: E402

torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True, scope="module")
def fresh_workers_for_each_file() -> Iterator[None]:
    """What a test finds in shared workers depends on its file alone."""
    yield
    end_shared_workers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pool()
