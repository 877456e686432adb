"""Every schedule on stages that are sharded or split."""

from __future__ import annotations

import pytest

from tests.harness import train_and_assert_parity
from tests.pipeline_parallel.test_sharded_stages import sharded
from tests.pipeline_parallel.test_tensor import crossed


@pytest.mark.parametrize(
    "schedule", ["zbv", *(pytest.param(name, marks=pytest.mark.full) for name in ("interleaved", "zb1p"))]
)
def test_zero(schedule: str) -> None:
    train_and_assert_parity(sharded("gpt-tied", 2, strategy={"pipeline": schedule, "microbatches": 4}, clip=0.1))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zbv", "interleaved", "zb1p"])
def test_tensor(schedule: str) -> None:
    train_and_assert_parity(crossed("llama", strategy={"pipeline": schedule, "microbatches": 4}, clip=0.1))
