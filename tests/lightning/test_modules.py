"""Modules in the forms that Lightning allows: compiled, built late or without values, with synchronised BatchNorm."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from packaging.version import Version
from torch import Tensor, nn

from tests.harness import WorkerError, run_distributed
from tests.lightning.classifier import FEATURES, Classifier, ClassifierData
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


def fit_compiled(strategy: Strategy) -> dict[str, Any]:
    module = classifier()
    compiled = module if strategy is None else torch.compile(module, backend="eager")
    trainer = trainer_for(strategy, max_epochs=1)
    trainer.fit(compiled, datamodule=ClassifierData())
    trainer.validate(compiled, datamodule=ClassifierData(), verbose=False)
    return {"step": trainer.global_step, "metrics": metrics(trainer), "weights": weights(module)}


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.14"),
    reason="the compiler of torch 2.13 cannot trace LightningModule.log: stock Trainers fail alike",
)
@pytest.mark.parametrize("zero_stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2))])
def test_a_compiled_module_trains_alike(zero_stage: int) -> None:
    # the compiler alone takes some 20 s of processor time on each rank, and leaves patches of its own
    assert assert_same_as_single_process(fit_compiled, zero_stage, limit=140.0, fresh=True)[0]["step"] == 4


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.normalize = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalize(x))


def fit_batch_norm(strategy: Strategy, synchronize: bool) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module = WithBatchNorm()
    trainer = trainer_for(strategy, max_epochs=2, sync_batchnorm=synchronize)
    trainer.fit(module, datamodule=ClassifierData())
    return {"metrics": metrics(trainer), "weights": weights(module)}


@EACH_STAGE
def test_batch_norm_without_synchronisation_is_that_of_stock_ddp(zero_stage: int) -> None:
    assert_same_as_ddp(fit_batch_norm, zero_stage, False)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_synchronised_batch_norm_needs_a_gpu_as_everywhere(zero_stage: int) -> None:
    for strategy in ("ddp", {"zero_stage": zero_stage}):
        with pytest.raises(WorkerError, match=r"SyncBatchNorm .* GPU"):
            run_distributed(fit_batch_norm, 2, strategy, True)


class BuiltLate(Classifier):
    """Makes its layers in ``configure_model``, which Lightning calls more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.late: nn.Linear | None = None

    def configure_model(self) -> None:
        self.calls += 1
        if self.late is None:
            self.late = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        assert self.late is not None
        return super().forward(self.late(x))


def fit_built_late(strategy: Strategy) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module = BuiltLate()
    trainer = trainer_for(strategy, max_epochs=1)
    trainer.fit(module, datamodule=ClassifierData())
    tested = trainer.test(module, datamodule=ClassifierData(), verbose=False)
    return {"calls": module.calls, "test": tested, "weights": weights(module)}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_configure_model_builds_on_the_way(zero_stage: int) -> None:
    assert_same_as_ddp(fit_built_late, zero_stage)  # late layers are drawn from the seed that every rank starts with


def start_without_values(zero_stage: int) -> dict[str, Any]:
    """Trains a module whose values come from a checkpoint of another run only."""
    strategy = {"zero_stage": zero_stage}
    saving = ModelCheckpoint("saved", filename="end", save_last=False)
    first = trainer_for(strategy, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    trained = classifier()
    first.fit(trained, datamodule=ClassifierData())
    barrier()
    second = trainer_for(strategy, max_epochs=1)
    with second.init_module(empty_init=True):
        empty = Classifier()
    on_meta = all(parameter.is_meta for parameter in empty.parameters())
    [tested] = second.test(empty, datamodule=ClassifierData(), ckpt_path="saved/end.ckpt", verbose=False)
    [expected] = first.test(trained, datamodule=ClassifierData(), verbose=False)
    return {"meta": on_meta, "test": tested["test_loss"], "expected": expected["test_loss"], "weights": weights(empty)}


@EACH_STAGE
def test_a_module_without_values_is_filled_by_the_checkpoint(zero_stage: int) -> None:
    for observed in run_distributed(start_without_values, 2, zero_stage):
        assert observed["meta"]
        assert observed["test"] == pytest.approx(observed["expected"], rel=1e-6)


def fit_from_empty(zero_stage: int) -> tuple[bool, list[dict[str, Tensor]]]:
    pl.seed_everything(5 + torch.distributed.get_rank(), verbose=False)
    trainer = trainer_for({"zero_stage": zero_stage}, max_epochs=1)
    started: list[dict[str, Tensor]] = []

    class Start(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            started.append(weights(pl_module))

    trainer.callbacks.append(Start())
    with trainer.init_module(empty_init=True):
        module = Classifier()
    trainer.fit(module, datamodule=ClassifierData())
    return trainer.callback_metrics["train_loss_epoch"].isfinite().item(), started


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_module_without_values_starts_from_equal_ones_on_all_ranks(zero_stage: int) -> None:
    (finite, [first]), (_, [second]) = run_distributed(fit_from_empty, 2, zero_stage)
    assert finite
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["stem.weight"].std() > 0


def average_weights(strategy: Strategy, how: str) -> dict[str, Any]:
    callback: pl.Callback = {
        "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
        "ema": lambda: EMAWeightAveraging(decay=0.5),
    }[how]()
    module = classifier()
    trainer = trainer_for(strategy, max_epochs=3, callbacks=[callback])
    trainer.fit(module, datamodule=ClassifierData())
    return {"weights": weights(module)}


@pytest.mark.parametrize("how", ["swa", "ema"])
def test_lightnings_weight_averaging_averages_full_copies(how: str) -> None:
    assert_same_as_single_process(average_weights, 0, how)


@pytest.mark.parametrize(
    ("strategy", "how", "name"),
    [
        ({"zero_stage": 2}, "swa", "StochasticWeightAveraging"),
        ({"zero_stage": 3}, "ema", "EMAWeightAveraging"),
        ({"tensor_parallel_size": 2}, "ema", "EMAWeightAveraging"),
        ({"pipeline_parallel_size": 2}, "swa", "StochasticWeightAveraging"),
    ],
    ids=["zero2-swa", "zero3-ema", "tp2-ema", "pp2-swa"],
)
def test_lightnings_weight_averaging_is_refused_on_shards(strategy: dict[str, int], how: str, name: str) -> None:
    with pytest.raises(WorkerError, match=rf"(?s){name}.*zero_stage=0"):
        run_distributed(average_weights, 2, strategy, how)


def find_learning_rate(strategy: Strategy) -> dict[str, Any]:
    module = classifier()
    module.learning_rate = 0.01
    trainer = trainer_for(strategy, max_epochs=20)
    before = weights(module)
    finder = Tuner(trainer).lr_find(module, datamodule=ClassifierData(), num_training=8, update_attr=False)
    after = weights(module)
    assert finder is not None
    return {
        "rates": finder.results["lr"],
        "losses": finder.results["loss"],
        "restored": all(torch.equal(before[name], after[name]) for name in before if "accuracy" not in name),
    }


@pytest.mark.parametrize("zero_stage", [0, 2, pytest.param(3, marks=pytest.mark.full)])
def test_the_learning_rate_finder_sees_the_same_losses_and_restores_the_weights(zero_stage: int) -> None:
    assert assert_same_as_ddp(find_learning_rate, zero_stage)[0]["restored"]
