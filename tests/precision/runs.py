"""Several trainings in one job, and what changes between their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_effi import EffiPrecision
from lightning_effi.compat import dtensor as dtensor_compat
from tests.harness import Training, TrainingRecord, run_distributed, run_isolated
from tests.harness.record import RankRecord, merge
from tests.harness.training import _train

# name → (processes, arguments of the strategy)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"zero_stage": 0}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (2, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "dp2-tp2": (4, {"tensor_parallel_size": 2, "zero_stage": 2}),
    "dp2-pp2": (4, {"pipeline_parallel_size": 2, "zero_stage": 0}),
    "tp2-pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "pp4": (4, {"pipeline_parallel_size": 4}),
    "tp4": (4, {"tensor_parallel_size": 4}),
}
ON_TWO = ("zero0", "zero2", "zero3", "tp2", "pp2")

Trainings = Mapping[str, Training]


def under(layout: str, training: Training, precision: EffiPrecision, **strategy: Any) -> Training:
    """The training under a layout, with a precision plugin of its own."""
    world_size, arguments = LAYOUTS[layout]
    settings = {**arguments, **strategy, "precision_plugin": precision}
    return replace(training, strategy=settings, world_size=world_size)


def run_all(trainings: Trainings) -> dict[str, TrainingRecord]:
    """Each training's record, merged over ranks; all have the same number of processes, and share one job."""
    [world_size] = {training.world_size for training in trainings.values()}
    by_rank = run_distributed(_train_each, world_size, dict(trainings), timeout=120.0)
    return {name: merge([records[name] for records in by_rank]) for name in trainings}


def references(trainings: Trainings, keep_callbacks: bool = False) -> dict[str, TrainingRecord]:
    """The same trainings in one process of the stock Trainer, in fp32."""
    found = {name: training.reference() for name, training in trainings.items()}
    if not keep_callbacks:
        found = {name: replace(training, callbacks=()) for name, training in found.items()}
    return {name: merge([record]) for name, record in run_isolated(_train_each, found, timeout=120.0).items()}


def _train_each(trainings: dict[str, Training]) -> dict[str, RankRecord]:
    return {name: _train(training) for name, training in trainings.items()}


def without_scale(record: TrainingRecord) -> TrainingRecord:
    """The record without the values that loss scaling logs, which a run in fp32 does not have."""
    logged = {key: value for key, value in record.logged.items() if not key.startswith("precision/")}
    return replace(record, logged=logged)


class Overflows(pl.Callback):
    """Puts an infinite value into a gradient of one rank, and notes what happens.

    Attributes:
        observation: after each step, the loss scale, the steps skipped so far and whether this rank's weights changed.
    """

    def __init__(self, victim: int, steps: tuple[int, ...]) -> None:
        self._victim = victim
        self._steps = steps
        self._before: dict[str, Tensor] = {}
        self.observation: list[tuple[float, int, bool]] = []

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank != self._victim or trainer.global_step not in self._steps:
            return
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        split = [g for g in gradients if hasattr(g, "placements")]  # where some are, those that other ranks do not hold
        local = next(
            dtensor_compat.local_tensor(g) for g in split or gradients if dtensor_compat.local_tensor(g).numel()
        )
        local.view(-1)[0] = float("inf")

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._before = {name: _local(parameter).clone() for name, parameter in pl_module.named_parameters()}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        changed = any(not torch.equal(self._before[name], _local(p)) for name, p in pl_module.named_parameters())
        plugin = trainer.strategy.precision_plugin
        assert trainer.callback_metrics["precision/loss_scale"] == plugin.loss_scale
        assert trainer.callback_metrics["precision/skipped_steps"] == plugin.skipped_steps
        self.observation.append((plugin.loss_scale, plugin.skipped_steps, changed))


def _local(parameter: Tensor) -> Tensor:
    return dtensor_compat.local_tensor(parameter).detach()
