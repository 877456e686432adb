"""Logged values are reduced by the rule that was asked for, each under its own name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.harness import WorkerError, make_trainer, run_distributed

# (value, rows) of each validation batch, by rank.
VALIDATION = (((1.0, 1), (1.0, 1), (2.0, 2)), ((1.0, 1), (1.0, 1), (2.0, 1)))


class Logger(pl.LightningModule):
    """One weight; validation batches are pairs of a value and its number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    @override
    def validation_step(self, batch: tuple[float, int], batch_idx: int) -> None:
        value, rows = batch
        self.log("mean", value, batch_size=rows, sync_dist=True)
        self.log("mean_of_tensor", torch.tensor(value), batch_size=rows, sync_dist=True)
        self.log("mean_of_integer", int(value), batch_size=rows, sync_dist=True)
        self.log("sum", value * rows, batch_size=rows, sync_dist=True, reduce_fx="sum")
        self.log("rows", rows, batch_size=rows, sync_dist=True, reduce_fx="sum")
        self.log("largest", value * rows, batch_size=rows, sync_dist=True, reduce_fx="max")
        self.log("smallest", value * rows + self.global_rank, batch_size=rows, sync_dist=True, reduce_fx="min")

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherNames(Logger):
    """Logs under a name that depends on the batch."""

    @override
    def validation_step(self, batch: tuple[float, int], batch_idx: int) -> None:
        self.log("everywhere", 1.0, batch_size=1, sync_dist=True)
        self.log("even" if self.global_rank == 0 else "odd", 10.0 + self.global_rank, batch_size=1, sync_dist=True)


class OtherNamesEveryStep(Logger):
    """The same in training, where values are reduced at once."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("even" if self.global_rank == 0 else "odd", 10.0 + self.global_rank, on_step=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class OtherOrder(Logger):
    """Logs the same names, on each rank in another order."""

    @override
    def validation_step(self, batch: tuple[float, int], batch_idx: int) -> None:
        names = ("one", "two") if self.global_rank == 0 else ("two", "one")
        for name in names:
            self.log(name, {"one": 1.0, "two": 2.0}[name], batch_size=1, sync_dist=True)


def validate(module_class: type[Logger]) -> dict[str, float]:
    """Runs in a worker: the metrics that ``Trainer.validate`` returns."""
    trainer = make_trainer({"zero_stage": 2}, 2, use_distributed_sampler=False)
    loader = DataLoader(VALIDATION[trainer.global_rank], batch_size=None)
    [metrics] = trainer.validate(module_class(), loader, verbose=False)
    return metrics


def train(module_class: type[Logger]) -> None:
    """Runs in a worker: one step."""
    trainer = make_trainer({"zero_stage": 2}, 2, max_steps=1, limit_val_batches=0)
    trainer.fit(module_class(), DataLoader(torch.ones(4, 2)))


def test_an_epoch_mean_weighs_each_row_of_each_rank_once() -> None:
    expected = {
        "mean": 10 / 7,  # (1 + 1 + 2·2 + 1 + 1 + 2) / 7 rows
        "mean_of_tensor": 10 / 7,
        "mean_of_integer": 10 / 7,
        "sum": 10.0,
        "rows": 7.0,
        "largest": 4.0,
        "smallest": 1.0,
    }
    for metrics in run_distributed(validate, 2, Logger):
        assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("job", "module"), [(validate, OtherNames), (train, OtherNamesEveryStep)])
def test_names_that_differ_between_ranks_are_an_error_that_lists_them(job: Any, module: type[Logger]) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 only: \w+\.even; rank 1 only: \w+\.odd") as failure:
        run_distributed(job, 2, module, timeout=30.0)
    assert failure.value.exception == "RuntimeError"


def test_names_in_another_order_on_each_rank_are_an_error() -> None:
    with pytest.raises(WorkerError, match=r"rank 0: \w+\.one, \w+\.two; order of rank 1: \w+\.two, \w+\.one"):
        run_distributed(validate, 2, OtherOrder, timeout=30.0)
