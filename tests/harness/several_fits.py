"""Several runs of ``Trainer.fit`` in one job, one after the other in the same processes.

A job's processes, their process group and torch's first use of each kernel cost more than a few steps of a small model,
so the cells of a small matrix share one. As a side effect every fit but the first starts in a process that has trained
before, as in a notebook.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_distributed, run_isolated
from tests.harness.fitting import BOUND, Fit, Outcome, make_fit, whole
from tests.harness.parity import assert_tensors_close

Runs = Mapping[str, Fit]


def fit_several(runs: Runs) -> dict[str, list[Outcome]]:
    """What each rank saw, by the run's name. All runs are distributed, and have the same ``world_size``."""
    [world_size] = {run.world_size for run in runs.values()}
    by_rank = run_distributed(_fit_each, world_size, dict(runs), timeout=60.0)
    return {name: whole([outcomes[name] for outcomes in by_rank]) for name in runs}


_references: dict[bytes, dict[str, Outcome]] = {}


def single_processes(runs: Runs) -> dict[str, Outcome]:
    """The same runs under the stock Trainer in one process; computed once per test session."""
    references = {name: replace(run, strategy=None, world_size=1) for name, run in runs.items()}
    key = pickle.dumps(references)
    if key not in _references:
        alone = run_isolated(_fit_each, references, timeout=60.0)
        _references[key] = {name: whole([outcome])[0] for name, outcome in alone.items()}
    return _references[key]


def assert_outcomes_equal(
    outcomes: list[Outcome], expected: Outcome, bound: float = BOUND, batches_per_step: int = 1
) -> None:
    """On every rank gradients, parameters, logged values and ``global_step`` are the expected ones.

    Args:
        bound: Of gradients relative to their norm, of parameters relative to the way from the initial ones, and of
            logged values relative to themselves.
        batches_per_step: Compare parameters after every that many batches.
    """
    for rank, outcome in enumerate(outcomes):
        who = f"rank {rank}, "
        assert len(outcome.gradients) == len(expected.gradients) > 0, f"{who}other number of optimizer steps"
        for step, (ours, theirs) in enumerate(zip(outcome.gradients, expected.gradients, strict=True), start=1):
            assert_tensors_close(f"{who}gradients of optimizer step {step}", ours, theirs, bound)
        start = expected.parameters[0]
        for name, initial in start.items():
            assert torch.equal(outcome.parameters[0][name], initial), f"{who}{name} is initialised differently"
        for batch, (ours, theirs) in enumerate(zip(outcome.parameters, expected.parameters, strict=True)):
            if batch and batch % batches_per_step == 0:
                assert_tensors_close(
                    f"{who}parameters after batch {batch}", ours, theirs, bound, start=start, steps=batch
                )
        assert outcome.logged == pytest.approx(expected.logged, rel=max(bound, 1e-6)), who
        assert outcome.global_step == expected.global_step, who


def _fit_each(runs: dict[str, Fit]) -> dict[str, Outcome]:
    outcomes = {}
    for name, run in runs.items():
        trainer, module, train, validation, watch = make_fit(run)
        trainer.fit(module, train, validation)
        watch.outcome.observations = [_observation(callback) for callback in trainer.callbacks]
        outcomes[name] = watch.outcome
    return outcomes


def _observation(callback: Any) -> Any:
    return getattr(callback, "observation", None)
