"""The Trainer's flags for short, partial and checked runs; the module's hooks come in Lightning's order."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.model_summary import ModelSummary

from tests.lightning.classifier import Classifier, ClassifierData
from tests.lightning.sides import (
    Strategy,
    assert_same_as_ddp,
    assert_same_as_single_process,
    classifier,
    metrics,
    trainer_for,
    weights,
)

HOOKS = (
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_model_eval",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_train",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)


class Diary(Classifier):
    """Notes every hook that Lightning calls."""

    def __init__(self) -> None:
        super().__init__()
        self.diary: list[str] = []


def _noting(name: str) -> Any:
    def hook(self: Diary, *args: Any, **kwargs: Any) -> Any:
        self.diary.append(name)
        return getattr(super(Diary, self), name)(*args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(Diary, _name, _noting(_name))


def run_with(strategy: Strategy, flags: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module = Diary()
    trainer = trainer_for(strategy, **{"max_epochs": 2, **flags})
    trainer.fit(module, datamodule=ClassifierData())
    return {
        "hooks": module.diary,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": metrics(trainer),
        "weights": weights(module),
    }


@pytest.mark.parametrize(
    ("zero_stage", "flags", "steps"),
    [
        pytest.param(0, {}, 8, id="plain-stage0"),
        pytest.param(2, {"num_sanity_val_steps": 1, "val_check_interval": 2}, 8, id="val_check_interval-stage2"),
        pytest.param(3, {"val_check_interval": 3, "check_val_every_n_epoch": None}, 8, id="val_by_steps-stage3"),
        pytest.param(1, {"limit_train_batches": 3, "limit_val_batches": 0.5}, 6, id="limits-stage1"),
        pytest.param(3, {"fast_dev_run": True}, 1, id="fast_dev_run-stage3"),
        pytest.param(1, {"fast_dev_run": 2}, 2, id="fast_dev_run_of_two-stage1", marks=pytest.mark.full),
        pytest.param(2, {"accumulate_grad_batches": 3}, 4, id="short_last_window-stage2"),
        pytest.param(3, {"max_epochs": -1, "max_steps": 5}, 5, id="max_steps-stage3"),
        pytest.param(2, {"gradient_clip_val": 0.1}, 8, id="clip_by_norm-stage2"),
        pytest.param(3, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 8, id="clip_by_value-stage3"),
        pytest.param(1, {"inference_mode": False, "barebones": True}, 8, id="barebones-stage1"),
    ],
)
def test_same_hooks_steps_metrics_and_weights(zero_stage: int, flags: dict[str, Any], steps: int) -> None:
    observed = assert_same_as_single_process(run_with, zero_stage, flags)[0]
    assert observed["step"] == steps
    assert "on_train_batch_end" in observed["hooks"]


def shuffle_with(strategy: Strategy, flags: dict[str, Any]) -> dict[str, Any]:
    module = classifier()
    trainer = trainer_for(strategy, max_epochs=2, **flags)
    data = ClassifierData(shuffle=True)
    trainer.fit(module, datamodule=data)
    sampler = trainer.train_dataloader.sampler
    return {
        "sampler": (type(sampler).__name__, getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)),
        "metrics": metrics(trainer),
        "weights": weights(module),
    }


@pytest.mark.parametrize(
    ("zero_stage", "flags"),
    [pytest.param(2, {}, id="shuffled-stage2"), pytest.param(3, {"overfit_batches": 2}, id="overfit_batches-stage3")],
)
def test_injected_samplers_are_those_of_stock_ddp(zero_stage: int, flags: dict[str, Any]) -> None:
    observed = assert_same_as_ddp(shuffle_with, zero_stage, flags)
    assert [rank["sampler"][1:] for rank in observed] == [(2, 0), (2, 1)]


def summarize(strategy: Strategy) -> dict[str, Any]:
    module = classifier()
    trainer = trainer_for(strategy, max_epochs=1, enable_model_summary=True)
    summaries: list[str] = []

    class Summarize(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            summaries.append(str(ModelSummary(pl_module, max_depth=2)))

    trainer.callbacks.append(Summarize())
    trainer.fit(module, datamodule=ClassifierData())
    return {"summary": summaries}


def test_model_summary_counts_whole_parameters() -> None:
    summary = assert_same_as_single_process(summarize, 3)[0]["summary"][0]
    parameters = sum(parameter.numel() for parameter in Classifier().parameters())
    assert f"{parameters} " in summary
    assert "| Block " in summary
