"""What is counted in updates waits where an update was skipped; what cannot go on ends with a name."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_effi import EffiPrecision
from tests.harness import BatchList, WorkerError, make_trainer, run_distributed
from tests.models.gpt import GPT, batches
from tests.precision.runs import LAYOUTS

BATCHES = 10
# Of the first three steps, and of one in the middle.
OVERFLOWS = (0, 1, 2, 6)


class Overflowing(GPT):
    """Warms up linearly; the loss of some steps is too large for 16-bit float."""

    def __init__(self, overflows: tuple[int, ...] = OVERFLOWS, rank: int | None = None) -> None:
        super().__init__(blocks=2)
        self.overflows = overflows
        self.rank = rank  # that is given the large losses; None: all, as ranks with one batch must be

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        too_large = batch_idx in self.overflows and self.rank in (None, self.global_rank)
        return loss * 1e8 if too_large else loss

    @override
    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: (update + 1) / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Rates(pl.Callback):
    def __init__(self) -> None:
        self.observation: list[tuple[float, bool, int]] = []
        self.rate = 0.0

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.rate = optimizer.param_groups[0]["lr"]

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        skipped = trainer.strategy.precision_plugin.last_step_skipped
        self.observation.append((self.rate, skipped, trainer.global_step))


class Counted(WeightAveraging):
    """Counts the averages that it takes."""

    def __init__(self) -> None:
        super().__init__(use_buffers=False)  # an average of masks is none
        self.count = 0

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        self.count += step_idx is not None
        return step_idx is not None


def fit(strategy: dict[str, Any], module: Any, callbacks: list[pl.Callback], batch_count: int = BATCHES, **knobs: Any):
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer(
        {**strategy, "precision_plugin": EffiPrecision("16-mixed", **knobs)},
        dist.get_world_size(),
        callbacks=callbacks,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(BatchList(batches(batch_count, rows=4)), batch_size=None))
    return trainer


def learning_rates(strategies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    observed = {}
    for name, strategy in strategies.items():
        rates, averaging = Rates(), Counted()
        module = Overflowing(rank=1 if "zero" in name else None)
        trainer = fit(strategy, module, [rates, averaging] if name == "zero0" else [rates])
        assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop), "put back after training"
        observed[name] = rates.observation
        if name == "zero0":
            observed["averages"] = averaging.count
            assert "should_update" not in vars(averaging)
    return observed


def test_schedulers_and_averages_of_weights_wait_for_updates() -> None:
    strategies = {name: LAYOUTS[name][1] for name in ("zero0", "zero1", "zero3", "tp2", "pp2")}
    updates = 0
    expected = []
    for batch in range(BATCHES):
        expected.append((pytest.approx(0.1 * (updates + 1) / 10), batch in OVERFLOWS, batch + 1))
        updates += batch not in OVERFLOWS
    for rank, observed in enumerate(run_distributed(learning_rates, 2, strategies, timeout=120.0)):
        assert observed.pop("averages") == BATCHES - len(OVERFLOWS)
        for name, table in observed.items():
            assert table == expected, f"{name}, seen by rank {rank}"


class Infinite(Overflowing):
    """The gradient of one layer of the second block is never finite, on the last rank alone."""

    @override
    def on_after_backward(self) -> None:
        weight = self.blocks[1].mlp[2].weight
        if weight is not None and self.global_rank == self.trainer.strategy.layout.world_size - 1:
            local = getattr(weight.grad, "_local_tensor", weight.grad)
            local.view(-1)[0] = float("inf")


def fit_until_stuck(strategy: dict[str, Any]) -> None:
    fit(strategy, Infinite(overflows=()), [], batch_count=30, init_scale=4.0)


@pytest.mark.parametrize("layout", ["zero2", pytest.param("tp2", marks=pytest.mark.full), "pp2"])
def test_repeated_overflow_at_the_smallest_scale_ends_with_the_parameters_name(layout: str) -> None:
    with pytest.raises(WorkerError) as caught:
        run_distributed(partial(fit_until_stuck, LAYOUTS[layout][1]), 2)
    message = str(caught.value)
    assert "5 optimizer steps in a row were skipped at the loss scale 1" in message
    assert "that of 'blocks.1.mlp.2.weight' (rank 1)" in message
    assert "keep_fp32=['blocks.1.mlp.2']" in message
