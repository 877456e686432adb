"""Session-wide set-up of the tests."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("tests.harness")
pytest_plugins = ["tests.budget"]

from tests.harness import close_pool  # noqa: E402

# The machine's cores belong to the workers, and one thread makes sums come out alike everywhere.
torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pool()
