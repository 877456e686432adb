"""Out of memory before the first update: smaller micro-batches, the same on all ranks, as if nothing had happened."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Training, WorkerError, run, run_reference, train_and_assert_parity
from tests.harness.parity import assert_parity
from tests.models.gpt import GPT, batches


class Hungry(GPT):
    """More than two rows at a time are too much for one of the ranks."""

    limit = 2

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        is_small = self.global_rank == self.trainer.world_size - 1
        if is_small and torch.is_grad_enabled() and len(tokens) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x


class Starving(Hungry):
    limit = 0


def retrying(module: Any, world_size: int, **strategy: Any) -> Training:
    settings = {"microbatches": {"count": 1, "oom_retry": True}, **strategy}
    return Training(module, partial(batches, rows=7), strategy=settings, world_size=world_size)


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, {}), (2, {"zero_stage": 0}), (2, {"zero_stage": 1}), (2, {"zero_stage": 2})]
)
def test_run_is_that_of_the_single_process(world_size: int, strategy: dict[str, Any]) -> None:
    training = retrying(Hungry, world_size, **strategy)
    reference = run_reference(Training(**{**training.__dict__, "module_factory": GPT}))
    assert_parity(run(training), reference)


def test_rows_that_never_fit_end_all_ranks() -> None:
    with pytest.raises(WorkerError, match="a micro-batch of one row does not fit") as caught:
        run(retrying(Starving, 2))
    assert caught.value.exception == "OutOfMemoryError"


def test_enough_memory_changes_nothing() -> None:
    train_and_assert_parity(retrying(GPT, 2))


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}])
def test_refused_where_ranks_wait_for_each_other(strategy: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match="oom_retry=True does not work with"):
        run(retrying(GPT, 2, **strategy))
