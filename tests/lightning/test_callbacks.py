"""Lightning's callbacks do under EffiStrategy what they do in one process under the stock Trainer."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning.classifier import Classifier, ClassifierData, Schedule, dataset
from tests.lightning.sides import (
    EACH_STAGE,
    Strategy,
    assert_same_as_ddp,
    assert_same_as_single_process,
    barrier,
    classifier,
    metrics,
    trainer_for,
    weights,
)


def keep_the_best(strategy: Strategy) -> dict[str, Any]:
    best = ModelCheckpoint("best", filename="{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    every = ModelCheckpoint("every", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    module = classifier()
    trainer = trainer_for(strategy, max_epochs=3, callbacks=[best, every], enable_checkpointing=True)
    trainer.fit(module, datamodule=ClassifierData())
    barrier()
    scores = {os.path.basename(path): float(score) for path, score in best.best_k_models.items()}
    return {
        "files": sorted(str(path) for path in Path().rglob("*.ckpt")),
        "scores": dict(sorted(scores.items())),
        "best": os.path.basename(best.best_model_path),
        "best score": float(best.best_model_score or 0.0),
        "metrics": metrics(trainer),
        "weights": weights(module),
    }


@EACH_STAGE
def test_model_checkpoint_keeps_the_same_best_and_last_files(zero_stage: int) -> None:
    observed = assert_same_as_single_process(keep_the_best, zero_stage)
    assert observed[0]["files"] == observed[1]["files"]
    assert "best/last.ckpt" in observed[0]["files"]
    assert len(observed[0]["scores"]) == 2


def stop_early(strategy: Strategy) -> dict[str, Any]:
    module = classifier()
    stopping = EarlyStopping("val_loss", patience=2, mode="max")  # the loss falls for a while
    trainer = trainer_for(strategy, max_epochs=9, callbacks=[stopping])
    trainer.fit(module, datamodule=ClassifierData())
    return {"epoch": stopping.stopped_epoch, "step": trainer.global_step, "best": float(stopping.best_score)}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_early_stopping_ends_after_the_same_epoch(zero_stage: int) -> None:
    first, second = assert_same_as_single_process(stop_early, zero_stage)
    assert 0 < first["epoch"] < 8
    assert first == second


class RankSpecificLoss(Classifier):
    """Logs a value of each rank's own, which keeps falling on rank 0 alone."""

    def on_validation_epoch_end(self) -> None:
        value = -float(self.current_epoch) if self.global_rank == 0 else 1.0
        self.log("own", torch.tensor(value), sync_dist=False)


def stop_on_one_rank(strategy: Strategy) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    trainer = trainer_for(strategy, max_epochs=6, callbacks=[EarlyStopping("own", patience=2)])
    trainer.fit(RankSpecificLoss(), datamodule=ClassifierData())
    return {"epoch": trainer.current_epoch, "step": trainer.global_step}


def test_early_stopping_of_one_rank_stops_all() -> None:
    first, second = assert_same_as_ddp(stop_on_one_rank, 2)
    assert first == second
    assert first["epoch"] < 6


def follow_learning_rates(strategy: Strategy, schedule: Schedule) -> dict[str, Any]:
    module = classifier(schedule=schedule)
    logger = CSVLogger("logs", name="run", version=0)
    monitor = LearningRateMonitor("step")
    trainer = trainer_for(strategy, max_epochs=3, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    trainer.fit(module, datamodule=ClassifierData())
    barrier()
    with open("logs/run/version_0/metrics.csv") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    rates = [row["lr-AdamW"] for row in rows if "lr-AdamW" in row]
    return {"rates": rates, "rows": [dict(sorted(row.items())) for row in rows], "weights": weights(module)}


@pytest.mark.parametrize(
    ("zero_stage", "schedule"),
    [
        (3, "step"),
        (0, "plateau"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(1, "epoch"), (2, "plateau")]),
    ],
)
def test_schedules_move_and_are_logged_alike(zero_stage: int, schedule: Schedule) -> None:
    observed = assert_same_as_single_process(follow_learning_rates, zero_stage, schedule)[0]
    assert len(set(observed["rates"])) > 1, "the schedule never moved"
    assert any("train_loss_step" in row for row in observed["rows"])


class Backbone(Classifier):
    """What ``BackboneFinetuning`` asks for: everything but the head under the name ``backbone``."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"stem": self.stem, "blocks": self.blocks})
        del self.stem, self.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone["stem"](x)
        for block in self.backbone["blocks"]:
            x = block(x)
        return self.head(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def unfreeze_later(strategy: Strategy) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module = Backbone()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5, verbose=False)
    trainer = trainer_for(strategy, max_epochs=2, callbacks=[finetuning])
    frozen = module.backbone["stem"].weight.detach().clone()
    trainer.fit(module, datamodule=ClassifierData())
    trained = weights(module)
    groups = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
    return {"moved": not torch.equal(trained["backbone.stem.weight"], frozen), "groups": groups, "weights": trained}


@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 3)), 2])
def test_backbone_is_unfrozen_in_mid_training(zero_stage: int) -> None:
    assert assert_same_as_single_process(unfreeze_later, zero_stage)[0]["moved"]


def find_learning_rate(strategy: Strategy) -> dict[str, Any]:
    finder = LearningRateFinder(num_training_steps=6, early_stop_threshold=None, update_attr=False)
    module = classifier()
    trainer = trainer_for(strategy, max_steps=3, callbacks=[finder], precision="64-true")
    trainer.fit(module, DataLoader(dataset(32, seed=1), batch_size=8))
    found = finder.optimal_lr
    assert found is not None
    return {"losses": found.results["loss"], "rates": found.results["lr"], "weights": weights(module)}


@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
def test_training_starts_anew_after_stages_searched_for_the_learning_rate(checkpoints: str) -> None:
    settings = {"pipeline_parallel_size": 2, "checkpoints": checkpoints, "microbatches": 2}
    assert_same_as_single_process(find_learning_rate, 0, **settings)


def accumulate_by_schedule(strategy: Strategy) -> dict[str, Any]:
    module = classifier()
    timer = Timer(interval="step")
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = trainer_for(strategy, max_epochs=2, callbacks=[scheduler, timer])
    trainer.fit(module, datamodule=ClassifierData())
    return {"steps": trainer.global_step, "timed": timer.time_elapsed("train") > 0, "weights": weights(module)}


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_accumulation_schedule_takes_the_same_steps(zero_stage: int) -> None:
    observed = assert_same_as_single_process(accumulate_by_schedule, zero_stage)[0]
    assert observed["steps"] == 4 + 2
    assert observed["timed"]


def run_out_of_time(strategy: Strategy) -> dict[str, Any]:
    timer = Timer(duration={"seconds": 0}, interval="step")
    trainer = trainer_for(strategy, max_epochs=50, callbacks=[timer])
    trainer.fit(classifier(), datamodule=ClassifierData())
    return {"steps": trainer.global_step, "stopped": trainer.should_stop}


def test_timer_ends_the_run_on_all_ranks_at_once() -> None:
    first, second = assert_same_as_ddp(run_out_of_time, 3)
    assert first == second == {"steps": 0, "stopped": True}


class WriteEachRank(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[int, list[int]]] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Tensor, batch_indices: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.batches.append((batch_idx, list(batch_indices)))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save({"rows": torch.cat(predictions), "indices": batch_indices}, f"rank{trainer.global_rank}.pt")


def predict_into_files(strategy: Strategy) -> dict[str, Any]:
    module, writer = classifier(), WriteEachRank()
    trainer = trainer_for(strategy, callbacks=[writer])
    returned = trainer.predict(module, datamodule=ClassifierData(), return_predictions=True)
    written = torch.load(f"rank{trainer.global_rank}.pt")
    assert returned is not None
    return {"returned": torch.cat(returned), "written": written, "batches": writer.batches}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_predictions_are_returned_and_written_with_their_indices(zero_stage: int) -> None:
    observed = assert_same_as_ddp(predict_into_files, zero_stage)
    indices = [index for rank in observed for _, batch in rank["batches"] for index in batch]
    assert sorted(indices) == list(range(16))
    with torch.no_grad():
        expected = classifier()(dataset(16, seed=2).tensors[0])
    for rank in observed:
        own = [index for _, batch in rank["batches"] for index in batch]
        torch.testing.assert_close(rank["returned"], expected[own], rtol=1e-5, atol=1e-6)
