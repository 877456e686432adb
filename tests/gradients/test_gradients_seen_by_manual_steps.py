"""A step that runs backward itself finds the gradients of the module's parameters, whatever is sharded."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.gradients.test_gradients_seen_by_hooks import READERS
from tests.harness.fitting import Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches


class Manual(GPT):
    """``observations``: what each reader gave, after each backward."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.automatic_optimization = False
        self.observations: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        self.clear(optimizer)
        self.manual_backward(super().training_step(batch, batch_idx))
        self.look()
        optimizer.step()

    def clear(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def look(self) -> None:
        self.observations.append({name: read(self) for name, read in READERS.items()})


class ClearsByModule(Manual):
    def clear(self, optimizer: Any) -> None:
        self.zero_grad()


class ClearsByBlock(Manual):
    def clear(self, optimizer: Any) -> None:
        for child in self.children():
            child.zero_grad()
        self.positions.grad = None


class ClearsToZero(Manual):
    def clear(self, optimizer: Any) -> None:
        self.zero_grad(set_to_none=False)


class Clips(Manual):
    def look(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class DropsGradients(Manual):
    def look(self) -> None:
        for name, parameter in self.named_parameters():
            if "bias" in name:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(0.5)


class TwoBackwards(Manual):
    """Accumulates by hand."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.clear(optimizer)
        for _ in range(2):
            self.manual_backward(GPT.training_step(self, batch, batch_idx) / 2)
            self.look()
        optimizer.step()  # type: ignore[union-attr]


class ClearsInHook(GPT):
    """Automatic optimization; Lightning's hook is overridden."""

    def __init__(self) -> None:
        super().__init__(blocks=2)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grad()


class Seen(pl.Callback):
    """``observation``: the module's own."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observation = getattr(pl_module, "observations", None)


MODULES = [Manual, ClearsByModule, ClearsByBlock, ClearsToZero, Clips, DropsGradients, TwoBackwards, ClearsInHook]
STAGES = pytest.mark.parametrize(
    "zero_stage", [pytest.param(1, marks=pytest.mark.full), 3], ids=lambda stage: f"zero{stage}"
)


def runs(zero_stage: int) -> dict[str, Fit]:
    strategy, data = {"zero_stage": zero_stage}, partial(batches, 2)
    return {module.__name__: Fit(module, data, strategy, callbacks=(Seen,)) for module in MODULES}


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@STAGES
@pytest.mark.parametrize("name", [module.__name__ for module in MODULES])
def test_what_is_done_to_gradients_has_its_effect(name: str, zero_stage: int) -> None:
    assert_outcomes_equal(outcomes(zero_stage)[name], single_processes(runs(zero_stage))[name])


@STAGES
@pytest.mark.parametrize("name", ["Manual", "TwoBackwards"])
def test_the_value_read_is_that_of_the_whole_gradient(name: str, zero_stage: int) -> None:
    expected = seen(single_processes(runs(zero_stage))[name])
    for outcome in outcomes(zero_stage)[name]:
        for ours, theirs in zip(seen(outcome), expected, strict=True):
            assert ours == {reader: pytest.approx(value, rel=1e-5) for reader, value in theirs.items()}


def seen(outcome: Outcome) -> list[Any]:
    return next(observation for observation in outcome.observations if observation)
