"""Every precision gives the gradients of the single process at every stage, with and without accumulation."""

from __future__ import annotations

from functools import cache, partial

import pytest

from tests.harness.fitting import STAGES_OF_WINDOWS, Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches

STEPS = 3
# Summed in another order, numbers of 8 significant bits differ in the last one or two. A window that was left out, or a
# rank, changes a gradient by a quarter and more.
BOUNDS = {"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 6e-2}


def runs(zero_stage: int) -> dict[str, Fit]:
    return {
        f"{precision}, {accumulate}": Fit(
            partial(GPT, blocks=2, learning_rate=0.1),
            partial(batches, STEPS * accumulate),
            strategy={"zero_stage": zero_stage},
            precision=precision,
            trainer={"accumulate_grad_batches": accumulate},
        )
        for precision in BOUNDS
        for accumulate in (1, 4)
    }


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@STAGES_OF_WINDOWS
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("accumulate", [1, 4], ids=lambda count: f"accumulate{count}")
def test_three_steps_equal_single_process(zero_stage: int, precision: str, accumulate: int) -> None:
    name = f"{precision}, {accumulate}"
    expected = single_processes(runs(zero_stage))[name]
    assert len(expected.gradients) == STEPS
    # Inside a window stages 1 and 2 show the gathered parameters, some of them in bf16.
    assert_outcomes_equal(outcomes(zero_stage)[name], expected, BOUNDS[precision], batches_per_step=accumulate)
