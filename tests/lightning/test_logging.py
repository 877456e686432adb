"""Loggers, progress bars, profilers, and what a module asks of the other ranks."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from tests.harness import run_distributed
from tests.lightning.classifier import Classifier, ClassifierData
from tests.lightning.sides import (
    Strategy,
    assert_same_as_ddp,
    assert_same_as_single_process,
    barrier,
    classifier,
    trainer_for,
)


def log_to_tensorboard(strategy: Strategy) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger("logs", name="run", version=0)
    trainer = trainer_for(strategy, max_epochs=2, logger=logger, log_every_n_steps=2)
    trainer.fit(classifier(), datamodule=ClassifierData())
    barrier()
    events = EventAccumulator("logs/run/version_0").Reload()
    names = sorted(tag for tag in events.Tags()["scalars"] if tag != "hp_metric")
    return {
        "files": sum(name.startswith("events") for name in os.listdir("logs/run/version_0")),
        "scalars": {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in names},
        "hyper-parameters": Path("logs/run/version_0/hparams.yaml").read_text(),
    }


def test_tensorboard_gets_the_same_values_from_one_rank() -> None:
    pytest.importorskip("tensorboard")
    observed = assert_same_as_single_process(log_to_tensorboard, 3)[0]
    assert observed["files"] == 1
    assert [step for step, _ in observed["scalars"]["train_loss_step"]] == [1, 3, 5, 7]


def show_progress(make_bar: Callable[[], pl.Callback]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        trainer = trainer_for({"zero_stage": 2}, max_epochs=1, callbacks=[make_bar()], enable_progress_bar=True)
        trainer.fit(classifier(), datamodule=ClassifierData())
    return output.getvalue()


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bar_counts_batches_and_shows_metrics_on_the_first_rank(bar: Callable[[], pl.Callback]) -> None:
    first, second = run_distributed(show_progress, 2, bar)
    assert "4/4" in first
    assert "val_loss" in first
    assert "4/4" not in second


def profile(make_profiler: Callable[..., Any]) -> str:
    profiler = make_profiler(dirpath=".", filename="profile")
    trainer = trainer_for({"zero_stage": 3}, max_epochs=1, profiler=profiler)
    trainer.fit(classifier(), datamodule=ClassifierData())
    return Path(f"fit-profile-{trainer.global_rank}.txt").read_text()


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler])
def test_profiler_reports_the_strategys_hooks(profiler: Callable[..., Any]) -> None:
    report = run_distributed(profile, 2, profiler)[0]
    assert "[Strategy]EffiStrategy.training_step" in report
    assert "[Strategy]EffiStrategy.backward" in report


def measure_throughput(strategy: Strategy) -> dict[str, Any]:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    logger = CSVLogger("logs", name="run", version=0)
    trainer = trainer_for(strategy, max_epochs=2, callbacks=[monitor], logger=logger, log_every_n_steps=2)
    trainer.fit(classifier(), datamodule=ClassifierData())
    barrier()
    with open("logs/run/version_0/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/samples_per_sec")]
    ratios = [float(row["train/samples_per_sec"]) / float(row["train/device/samples_per_sec"]) for row in rows]
    return {"batches": [row["train/device/batches_per_sec"] != "" for row in rows], "devices": ratios}


def test_throughput_is_multiplied_by_the_number_of_ranks() -> None:
    observed = assert_same_as_ddp(measure_throughput, 2)[0]
    assert observed["devices"]
    assert observed["devices"] == pytest.approx([2.0] * len(observed["devices"]))


class Asking(Classifier):
    """Gathers and reduces in every place where people do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mean = SumMetric(), MeanMetric().set_dtype(torch.float64)
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        gathered = self.all_gather(x.sum(), sync_grads=True)
        self.seen["gathered"] = float(gathered.sum())
        self.rows.update(len(x))
        self.mean.update(x.mean(), weight=len(x))
        reduced = self.trainer.strategy.reduce(x.sum().detach(), reduce_op="sum")
        self.seen["reduced"] = float(reduced)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("largest", x.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("total", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        parts = self.all_gather({"rank": torch.tensor(self.global_rank), "bias": self.head.bias.sum().detach()})
        self.seen["ranks"] = parts["rank"].flatten().tolist()
        self.seen["biases"] = parts["bias"].mean()
        self.log("bias", self.head.bias.sum(), sync_dist=True)
        self.log("norm", self.blocks[0].linear.weight.norm())


def ask(strategy: Strategy) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module = Asking()
    trainer = trainer_for(strategy, max_epochs=2)
    trainer.fit(module, datamodule=ClassifierData())
    names = ("rows", "mean", "largest", "total", "train_accuracy", "val_accuracy", "train_loss_epoch", "bias", "norm")
    return {
        "gathered": module.seen["gathered"],
        "reduced": module.seen["reduced"],
        "logged": {name: float(trainer.callback_metrics[name]) for name in names},
        "biases": float(module.seen["biases"]),
        "ranks": len(module.seen["ranks"]) == trainer.world_size,
    }


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_gathered_reduced_and_metric_values_are_the_whole_batchs(zero_stage: int) -> None:
    observed = assert_same_as_single_process(ask, zero_stage)[0]
    assert observed["logged"]["rows"] == 32
    assert observed["ranks"]


def test_reduce_of_other_things_leaves_them_alone() -> None:
    for results in run_distributed(reduce_things, 2):
        assert results == {"mean": 1.5, "sum": 3.0, "counts": 1.5, "text": "as it is", "argument": True}


def reduce_things() -> dict[str, Any]:
    module, seen = classifier(), {}

    class Reduce(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            reduce = trainer.strategy.reduce
            own = torch.tensor(float(trainer.global_rank + 1))
            seen["mean"] = float(reduce(own))
            seen["sum"] = float(reduce(own, reduce_op="sum"))
            seen["counts"] = float(reduce(torch.tensor(trainer.global_rank + 1)))
            seen["text"] = reduce("as it is")
            seen["argument"] = float(own) == trainer.global_rank + 1

    trainer_for({"zero_stage": 2}, fast_dev_run=True, callbacks=[Reduce()]).fit(module, datamodule=ClassifierData())
    return json.loads(json.dumps(seen))
