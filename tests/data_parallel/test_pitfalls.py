"""Traps of sharding by FSDP2 that do not show in an ordinary training loop."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness import WorkerError, run_distributed
from tests.harness.fitting import (
    ALL_STAGES,
    SHARDED_STAGES,
    Fit,
    assert_equals_single_process,
    fit,
    make_fit,
    rows_of_rank,
    single_process,
)

WIDTH = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Regressor(pl.LightningModule):
    """A batch is ``(x [rows, WIDTH], y [rows])``."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual(), Residual())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x)).squeeze(-1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](self.parameters(), lr=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(5))
    return [(rows, rows.sum(dim=1).sin()) for rows in x]


# --- parameters that stay gathered after a forward without backward -------------------------------------------------


class LooksAhead(Regressor):
    """Runs a forward before each step, with autograd on, that no backward follows."""

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.ahead = self(batch[0])


class SwapsWeightsAfterEvaluation(pl.Callback):
    """As moving averages do: other weights for validation, some of both when training goes on."""

    @torch.no_grad()
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.mul_(0.5)

    @torch.no_grad()
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.mul_(1.5).add_(0.01)


class LoadsWeightsAfterEvaluation(pl.Callback):
    """Goes back to the weights of the first evaluation after each later one."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = {"state_dict": trainer.strategy.broadcast(trainer.strategy.lightning_module_state_dict())}
        if self.saved is None:
            self.saved = copy.deepcopy(state)
        else:
            trainer.strategy.load_model_state_dict(self.saved)


@SHARDED_STAGES
@pytest.mark.parametrize("callback", [SwapsWeightsAfterEvaluation, LoadsWeightsAfterEvaluation])
def test_weights_changed_after_evaluation_are_those_that_train(callback: type[pl.Callback], zero_stage: int) -> None:
    run = Fit(
        LooksAhead,
        batches,
        {"zero_stage": zero_stage},
        validation=batches,
        callbacks=(callback,),
        trainer={"val_check_interval": 1, "num_sanity_val_steps": 1},
    )
    assert_equals_single_process(run)


# --- gradients that were not reduced yet ----------------------------------------------------------------------------


class ForgetsFirstHalfOfWindow(pl.Callback):
    """Calls ``zero_grad`` in the middle of an accumulation window."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            trainer.optimizers[0].zero_grad()


@ALL_STAGES
def test_zero_grad_inside_a_window_forgets_what_was_not_reduced_yet(zero_stage: int) -> None:
    run = Fit(
        Regressor,
        batches,
        {"zero_stage": zero_stage},
        callbacks=(ForgetsFirstHalfOfWindow,),
        trainer={"accumulate_grad_batches": 2},
    )
    assert_equals_single_process(run)


# --- optimizers on shards -------------------------------------------------------------------------------------------


class SignSGD(torch.optim.SGD):
    """A subclass may do anything, so it is not known to work element by element; it notes what it is given."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.given = {type(parameter) for group in self.param_groups for parameter in group["params"]}
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])
        return loss


OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "normalized": SignSGD,
    "lbfgs": torch.optim.LBFGS,
}


class CountsCalls(pl.Callback):
    """How often closure and hooks of the optimizer run, and the types of its parameters and states at rest."""

    def __init__(self) -> None:
        self.observation: dict[str, Any] = {"steps": 0, "clips": 0, "zero_grads": 0, "pre": 0, "post": 0}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        [optimizer] = trainer.optimizers
        optimizer.register_step_pre_hook(lambda *_: self._count("pre"))
        optimizer.register_step_post_hook(lambda *_: self._count("post"))

    def _count(self, what: str) -> None:
        self.observation[what] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self._count("zero_grads")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._count("steps")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        [optimizer] = trainer.optimizers
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [v for p in parameters for k, v in optimizer.state.get(p, {}).items() if k != "step"]
        self.observation["parameters at rest"] = {isinstance(parameter, DTensor) for parameter in parameters}
        self.observation["states at rest"] = {isinstance(state, DTensor) for state in states}
        self.observation["given"] = getattr(optimizer, "given", None)


class CountsClips(Regressor):
    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.clips = 0

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clips += 1
        super().configure_gradient_clipping(*args, **kwargs)

    def on_train_end(self) -> None:
        assert self.clips == 4


@SHARDED_STAGES
@pytest.mark.parametrize("optimizer", ["adamw", "normalized"])
def test_closure_and_hooks_run_once_and_states_at_rest_are_sharded(optimizer: str, zero_stage: int) -> None:
    run = Fit(
        partial(CountsClips, optimizer),
        batches,
        {"zero_stage": zero_stage},
        callbacks=(CountsCalls,),
        trainer={"gradient_clip_val": 0.1},
    )
    for outcome in assert_equals_single_process(run):
        [observed] = outcome.observations
        assert {observed[what] for what in ("steps", "zero_grads", "pre", "post")} == {4}
        assert observed["parameters at rest"] == {True}
        if optimizer == "adamw":
            assert observed["states at rest"] == {True}
        else:
            assert all(issubclass(kind, DTensor) or kind is nn.Parameter for kind in observed["given"])


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_lbfgs_is_refused_on_shards_with_a_way_out(zero_stage: int) -> None:
    with pytest.raises(WorkerError, match=rf"zero_stage={zero_stage}.*LBFGS.*zero_stage=0"):
        fit(Fit(partial(Regressor, "lbfgs"), batches, {"zero_stage": zero_stage}))


# --- stage 0 --------------------------------------------------------------------------------------------------------


def forwards_through_ddp(run: Fit) -> int:
    calls = 0
    original = DistributedDataParallel.forward

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *args, **kwargs)

    DistributedDataParallel.forward = forward
    trainer, module, train, _, _ = make_fit(run)
    trainer.fit(module, train)
    return calls


def test_stage_0_runs_in_the_stock_reducer() -> None:
    results = run_distributed(forwards_through_ddp, 2, Fit(Regressor, batches, {"zero_stage": 0}), fresh=True)
    assert results == [len(batches())] * 2


# --- training steps that change parameters themselves ---------------------------------------------------------------


class TeacherAndClampedWeights(Regressor):
    """Distils into the student a teacher that follows it; some of the student's weights are kept in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for mine, followed in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
            mine.data.mul_(0.9).add_(followed.data, alpha=0.1)
        self.head.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.network[1].linear.weight.clamp_(-0.25, 0.25)
        x, y = batch
        return F.mse_loss(self(x), y) + F.mse_loss(self.network(x), self.teacher(x) + 1)


@ALL_STAGES
def test_changes_made_inside_a_training_step_survive(zero_stage: int) -> None:
    run = Fit(TeacherAndClampedWeights, batches, {"zero_stage": zero_stage})
    start, *_, end = single_process(run).parameters
    assert not torch.equal(start["teacher.1.linear.weight"], end["teacher.1.linear.weight"])
    assert float(start["head.weight"].abs().max()) > 0.2, "nothing would be clamped"
    assert_equals_single_process(run)


# --- buffers --------------------------------------------------------------------------------------------------------


class WithBatchNorm(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.bn(x))


class BufferValues(pl.Callback):
    """Running means when validation starts and in the state that would be saved."""

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: WithBatchNorm) -> None:
        self.observation = [pl_module.bn.running_mean.clone()]

    def on_train_end(self, trainer: pl.Trainer, pl_module: WithBatchNorm) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.observation.append(pl_module.bn.running_mean.clone())
        self.observation.append(state["bn.running_mean"].clone() if state else None)


@ALL_STAGES
def test_batch_norm_statistics_are_the_first_ranks_on_all_ranks(zero_stage: int) -> None:
    run = Fit(WithBatchNorm, batches, {"zero_stage": zero_stage}, validation=batches, callbacks=(BufferValues,))
    expected = torch.zeros(WIDTH, dtype=torch.float64)
    for batch in batches():
        expected = 0.9 * expected + 0.1 * rows_of_rank(batch, 0, 2)[0].double().mean(dim=0)
    first, second = (outcome.observations[0] for outcome in fit(run))
    torch.testing.assert_close(first[0], expected)
    for other in (first[1], first[2], second[0]):
        assert torch.equal(other, first[0])
