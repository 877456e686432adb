"""Optimizers that need all parameters at once: right over the stages, or refused before the first update."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import Training, WorkerError, run_training, train_and_assert_parity
from tests.models.gpt import GPT, batches

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}


class WithOptimizer(GPT):
    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        import timm.optim

        match self.kind:
            case "lamb":
                return timm.optim.Lamb(self.parameters(), lr=1e-2, max_grad_norm=0.1)
            case "lbfgs":
                return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=2)
            case "one step size":
                return OneStepSize(self.parameters(), {"lr": 1e-2})
            case _:
                return timm.optim.Lars(self.parameters(), lr=1e-2)


class OneStepSize(torch.optim.Optimizer):
    """As D-Adaptation and Prodigy do: one number, read from all gradients, is the step size of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.abs().sum()) for p in parameters)
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=-1e-2 / total)
        return loss


def training(kind: str) -> Training:
    module, data = partial(WithOptimizer, kind), partial(batches, rows=4)
    return Training(
        module, data, strategy=STAGES, world_size=2, precision="64-true", optimizer=None, learning_rate=None, steps=2
    )


@pytest.mark.parametrize("kind", ["lamb", pytest.param("lars", marks=pytest.mark.full)])
def test_norms_within_an_update_are_taken_over_all_stages(kind: str) -> None:
    pytest.importorskip("timm")
    train_and_assert_parity(training(kind))


@pytest.mark.parametrize(("kind", "name"), [("lbfgs", "LBFGS"), ("one step size", "OneStepSize")])
def test_updates_that_couple_parameters_are_refused(kind: str, name: str) -> None:
    pytest.importorskip("timm")
    described = training(kind)
    with pytest.raises(
        WorkerError, match=rf"pipeline: {name} updates '[\w.]+' with what it computes from '[\w.]+' too"
    ):
        run_training(
            described.module_factory,
            described.data_factory,
            strategy=STAGES,
            world_size=2,
            optimizer=None,
            steps=1,
            precision="64-true",
        )
