"""Accumulation windows: short ones at the end of an epoch, and ones in which a step returns no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.harness import WorkerError, full_parameters
from tests.harness.fitting import BOUND, STAGES_OF_WINDOWS, Fit, Outcome, fit, single_process
from tests.harness.parity import assert_tensors_close
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches

WINDOW = 4
EPOCHS = 2

# One epoch has a window of 4 and one of 2 batches.
SHORT = 6
# In turn: a window's second batch, another's last, another's first, all of another.
WITHOUT_LOSS = (1, 7, 8, 12, 13, 14, 15)
FULL_WINDOWS = 16


class SometimesNoLoss(GPT):
    """``training_step`` returns ``None`` for the batches with these indices."""

    def __init__(self, without_loss: Sequence[int] = ()) -> None:
        super().__init__(blocks=2)
        self.without_loss = without_loss

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx in self.without_loss else super().training_step(batch, batch_idx)


class LearningRates(pl.Callback):
    """``observation``: global_step and learning rate at each optimizer step."""

    def __init__(self) -> None:
        self.observation: list[tuple[int, float]] = []

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.observation.append((trainer.global_step, optimizer.param_groups[0]["lr"]))


def windows(count: int, without_loss: Sequence[int] = (), **strategy: Any) -> Fit:
    """``EPOCHS`` epochs of ``count`` batches in windows of ``WINDOW``."""
    return Fit(
        partial(SometimesNoLoss, without_loss),
        partial(batches, count),
        strategy=strategy,
        callbacks=(LearningRates,),
        trainer={"accumulate_grad_batches": WINDOW, "max_epochs": EPOCHS},
    )


def runs(zero_stage: int) -> dict[str, Fit]:
    return {
        "stock": windows(SHORT, zero_stage=zero_stage),
        "exact": windows(SHORT, zero_stage=zero_stage, exact_accumulation=True),
    }


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@STAGES_OF_WINDOWS
def test_a_short_last_window_equals_stock_lightning(zero_stage: int) -> None:
    expected = single_processes(runs(zero_stage))["stock"]
    assert_outcomes_equal(outcomes(zero_stage)["stock"], expected)


@STAGES_OF_WINDOWS
def test_schedulers_and_global_step_count_windows_not_batches(zero_stage: int) -> None:
    steps = EPOCHS * -(-SHORT // WINDOW)
    for outcome in outcomes(zero_stage)["stock"]:
        assert outcome.global_step == steps
        observed = next(observation for observation in outcome.observations if observation)
        assert observed == [(k, pytest.approx(0.5 / (1 + 0.1 * k))) for k in range(steps)]


@STAGES_OF_WINDOWS
def test_exact_accumulation_is_the_mean_over_the_batches_really_in_the_window(zero_stage: int) -> None:
    assert_equals_mean_over_window(outcomes(zero_stage)["exact"])


def test_batches_without_loss_leave_the_divisor_and_no_stale_gradient_in_one_process() -> None:
    run = alone(windows(FULL_WINDOWS, WITHOUT_LOSS))
    expected = single_process(run)
    assert expected.gradients[3] == {}, "a window without any loss has no gradient"
    assert_outcomes_equal(fit(run), expected)


def test_exact_accumulation_does_not_count_batches_without_loss() -> None:
    run = alone(windows(SHORT, without_loss=(1,), exact_accumulation=True))
    assert_equals_mean_over_window(fit(run), without_loss=(1,))


@pytest.mark.parametrize("zero_stage", [0, 3], ids=lambda stage: f"zero{stage}")
def test_a_batch_without_loss_ends_all_ranks_with_lightnings_own_error(zero_stage: int) -> None:
    with pytest.raises(WorkerError, match="returning None in distributed training is not supported"):
        fit(windows(SHORT, without_loss=(WINDOW - 1,), zero_stage=zero_stage))


def alone(run: Fit) -> Fit:
    """The same in one process, but under EffiStrategy."""
    return replace(run, world_size=1)


def assert_equals_mean_over_window(outcomes: list[Outcome], without_loss: Sequence[int] = ()) -> None:
    gradients, parameters = train_on_mean_over_window(without_loss)
    for outcome in outcomes:
        assert len(outcome.gradients) == len(gradients)
        for step, (ours, theirs) in enumerate(zip(outcome.gradients, gradients, strict=True), start=1):
            assert_tensors_close(f"gradients of step {step}", ours, theirs, BOUND)
        assert_tensors_close(
            "parameters at the end", outcome.parameters[-1], parameters, BOUND, start=outcome.parameters[0]
        )


@cache
def train_on_mean_over_window(without_loss: Sequence[int]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients of each step and final parameters of a loop written out by hand."""
    pl.seed_everything(7, verbose=False)
    module = SometimesNoLoss().double()
    configuration = module.configure_optimizers()
    optimizer, schedule = configuration["optimizer"], configuration["lr_scheduler"]["scheduler"]
    data, gradients = batches(SHORT), []
    for _ in range(EPOCHS):
        for first in range(0, SHORT, WINDOW):
            present = [i for i in range(first, min(first + WINDOW, SHORT)) if i not in without_loss]
            torch.stack([module.loss(data[i]) for i in present]).mean().backward()
            gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return gradients, full_parameters(module)
