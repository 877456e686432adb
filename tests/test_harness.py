"""The harness itself: results, failures and hangs of jobs come back as they should."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from tests.budget import ALL, BUDGET
from tests.harness import (
    Training,
    WorkerError,
    WorkerTimeout,
    assert_parity,
    run,
    run_distributed,
    run_isolated,
    run_reference,
    train_and_assert_parity,
)
from tests.harness.parity import relative_errors
from tests.harness.record import RankRecord, Tensors, merge
from tests.models import MODELS, ModelCase


def sum_of_ranks() -> torch.Tensor:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total


def rank_and_directory() -> tuple[int, str, list[str]]:
    with open(f"rank{dist.get_rank()}", "w") as file:
        file.write("here")
    dist.barrier()
    return dist.get_rank(), os.getcwd(), sorted(os.listdir())


def leave_a_mark() -> str | None:
    before = os.environ.get("MARK")
    os.environ["MARK"] = "left"
    return before


def rank_one_raises_the_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("sample 13 is bad")
    dist.barrier()


def rank_one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_zero_waits_for_ever(pid_file: str) -> None:
    if dist.get_rank() == 0:
        with open(pid_file, "w") as file:
            file.write(str(os.getpid()))
        wait_for_a_message_that_never_comes()


def wait_for_a_message_that_never_comes() -> None:
    signal.pause()


def has_process_group() -> bool:
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives_work_on_every_rank(world_size: int) -> None:
    results = run_distributed(sum_of_ranks, world_size)
    assert [float(result) for result in results] == [world_size * (world_size + 1) / 2] * world_size


def test_results_are_ordered_by_rank_and_ranks_share_a_directory() -> None:
    results = run_distributed(rank_and_directory, 2)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert results[0][1] == results[1][1]
    assert results[0][2] == results[1][2] == ["rank0", "rank1"]
    assert not os.path.exists(results[0][1])


def test_jobs_do_not_see_what_earlier_ones_left() -> None:
    assert run_distributed(leave_a_mark, 2) == [None, None]
    assert run_distributed(leave_a_mark, 2) == [None, None]


def test_isolated_job_has_no_process_group() -> None:
    assert run_isolated(has_process_group) is False


def test_first_failing_rank_is_shown_and_the_rest_ended_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="sample 13 is bad") as caught:
        run_distributed(rank_one_raises_the_others_wait, 2)
    assert (caught.value.rank, caught.value.exception) == (1, "KeyError")
    assert time.monotonic() - start < 20


def test_death_of_a_rank_is_named() -> None:
    with pytest.raises(WorkerError, match="rank 1 ended with status -9") as caught:
        run_distributed(rank_one_dies, 2)
    assert caught.value.rank == 1


def test_hang_is_killed_and_shows_where_it_stood(tmp_path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(WorkerTimeout, match="wait_for_a_message_that_never_comes"):
        run_distributed(rank_zero_waits_for_ever, 2, str(pid_file), timeout=2.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_harness_survives_failures() -> None:
    with pytest.raises(WorkerError):
        run_distributed(rank_one_raises_the_others_wait, 2)
    assert [float(result) for result in run_distributed(sum_of_ranks, 2)] == [3.0, 3.0]


# --- training -------------------------------------------------------------------------------------------------------

GPT = MODELS["gpt-tied"]


class DoubleOneGradient(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.norm.weight.grad.mul_(2)


class DriftOnRankOne(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.norm.bias.add_(1e-7)


def test_stock_ddp_equals_single_process() -> None:
    training = Training(GPT.module, GPT.batches, strategy="ddp", world_size=2, accumulate=2)
    record = train_and_assert_parity(training)
    assert len(record.losses) == 3 * 2 * 2
    assert len(record.gradients) == len(record.gradient_norms) == len(record.learning_rates) == 3
    assert len(record.parameters) == 4
    assert record.global_step == 3
    assert record.learning_rates == [[0.5], [0.5 / 1.1], [0.5 / 1.2]]
    assert record.logged["train_loss_epoch"] == pytest.approx(sum(record.losses) / len(record.losses))


def test_reference_is_computed_once() -> None:
    training = Training(GPT.module, GPT.batches, strategy="ddp", world_size=2, accumulate=2)
    twin = Training(MODELS["gpt-tied"].module, MODELS["gpt-tied"].batches, strategy={}, world_size=4)
    assert run_reference(training) is run_reference(twin)


def test_wrong_gradient_is_found_and_named() -> None:
    right = Training(GPT.module, GPT.batches, strategy="ddp", world_size=2)
    wrong = replace(right, callbacks=(DoubleOneGradient,))
    with pytest.raises(AssertionError, match=r"gradients of step 1: 1 of 52 tensors .* norm\.weight 1\.00e\+00"):
        assert_parity(run(wrong), run_reference(right))


def test_wrong_logged_value_is_found_whether_of_a_step_or_of_an_epoch() -> None:
    reference = run_reference(Training(GPT.module, GPT.batches))
    for key in ("train_loss", "train_loss_step", "train_loss_epoch"):
        wrong = replace(reference, logged={**reference.logged, key: reference.logged[key] * 1.001})
        with pytest.raises(AssertionError, match=f"logged {key}:"):
            assert_parity(wrong, reference)


def test_wrong_learning_rate_is_found() -> None:
    right = Training(GPT.module, GPT.batches, strategy="ddp", world_size=2)
    with pytest.raises(AssertionError, match=r"learning rates of step 1 are \[0\.4\], not \[0\.5\]"):
        assert_parity(run(replace(right, learning_rate=0.4)), run_reference(right))


def test_ranks_that_drift_apart_are_found() -> None:
    training = Training(GPT.module, GPT.batches, strategy="ddp", world_size=2, callbacks=(DriftOnRankOne,))
    with pytest.raises(AssertionError, match=r"norm\.bias is held by rank 1 with other values"):
        run(training)


def updated(weights: Sequence[float], steps: int, rate: float = 1.0, ulps: int = 0) -> tuple[Tensors, Tensors]:
    """fp32 weights before and after equal updates of 1e-3, and what rounding may add to each element."""
    start = torch.tensor(weights)
    end = start.clone()
    for _ in range(steps):
        end -= 1e-3 * rate
    return {"weight": start}, {"weight": end + ulps * torch.finfo(torch.float32).eps * start}


@pytest.mark.parametrize("steps", [1, 3])
def test_one_unit_in_the_last_place_for_each_update_is_rounding(steps: int) -> None:
    start, expected = updated([1.0, -1.0, 0.3], steps)
    _, rounded = updated([1.0, -1.0, 0.3], steps, ulps=steps)
    _, wrong = updated([1.0, -1.0, 0.3], steps, ulps=steps + 1)
    assert relative_errors(rounded, expected, start, steps)["weight"] <= 1e-5
    assert relative_errors(wrong, expected, start, steps)["weight"] > 1e-5
    assert relative_errors(rounded, expected)["weight"] > 0.0  # a gradient has no such allowance


@pytest.mark.parametrize("size", [1.0, 0.1], ids=["norm-weight", "matrix"])
def test_a_step_that_is_a_thousandth_too_long_is_no_rounding(size: float) -> None:
    start, expected = updated([size], 3)
    _, longer = updated([size], 3, rate=1.001)
    assert relative_errors(longer, expected, start, 3)["weight"] > 1e-5


def test_nan_is_neither_zero_nor_close_to_anything() -> None:
    zero, nan = RankRecord(losses=[0.0]), RankRecord(losses=[math.nan])
    assert math.isnan(merge([nan, nan]).losses[0])
    with pytest.raises(AssertionError, match="rank 1 has other losses"):
        merge([zero, nan])
    start, expected = updated([1.0], 1)
    error = relative_errors({"weight": torch.tensor([math.nan])}, expected, start, 1)["weight"]
    assert math.isnan(error)


def test_budgets_are_of_folders_and_fit_into_ten_minutes_of_two_cores() -> None:
    assert all((Path(__file__).parent / folder).is_dir() for folder in BUDGET)
    assert sum(BUDGET.values()) <= ALL


def initial_loss_and_number_of_blocks(case: ModelCase) -> tuple[float, int]:
    pl.seed_everything(3, verbose=False)
    module = case.module()
    [batch] = case.batches(1)
    return float(module.loss(batch)), len(module.get_submodule(case.blocks))


@pytest.mark.parametrize("name", MODELS)
def test_model_cases_are_reproducible(name: str) -> None:
    case = MODELS[name]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    first, second = (run_isolated(initial_loss_and_number_of_blocks, case) for _ in range(2))
    assert first == second
    assert first[1] >= 2
