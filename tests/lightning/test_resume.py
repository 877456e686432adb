"""A run that was interrupted and resumed equals one that was not, bit for bit where the layout is the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.harness import full_tensor, run_distributed, run_isolated
from tests.lightning.classifier import ClassifierData
from tests.lightning.sides import Strategy, assert_same, barrier, classifier, metrics, trainer_for, weights

EPOCH_END, MID_EPOCH = "at-step=4.ckpt", "at-step=6.ckpt"
Formats = pytest.mark.parametrize("checkpoints", ["full", "sharded"])


class Ending(pl.Callback):
    """Notes the state in which training ends, while optimizers still belong to the run."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        moments: dict[str, Tensor] = {}
        for name, parameter in pl_module.named_parameters():
            for key, value in sorted(trainer.optimizers[0].state[parameter].items()):
                moments[f"{name}.{key}"] = full_tensor(value)
        self.state = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "metrics": metrics(trainer),
            "weights": weights(pl_module),
            "moments": moments,
        }


def train(strategy: Strategy, path: str | None = None, seed: int = 5, **flags: Any) -> dict[str, Any]:
    """Three epochs of four steps, resumed from ``path`` if given; leaves a checkpoint every two steps."""
    module, ending = classifier(seed, schedule="step"), Ending()
    saving = ModelCheckpoint("saved", filename="at-{step}", every_n_train_steps=2, save_top_k=-1)
    callbacks = [ending] if path else [ending, saving]
    trainer = trainer_for(strategy, max_epochs=3, callbacks=callbacks, enable_checkpointing=not path, **flags)
    trainer.fit(module, datamodule=ClassifierData(), ckpt_path=path)
    barrier()
    return ending.state


def uninterrupted_and_resumed(strategy: Strategy) -> list[dict[str, Any]]:
    return [train(strategy), *(train(strategy, f"saved/{name}", seed=99) for name in (EPOCH_END, MID_EPOCH))]


# Each format, and stages 0, 2 and 3; the others behind the marker "full".
RESUMED = {(2, "full"), (3, "sharded")}


@pytest.mark.parametrize(
    ("zero_stage", "checkpoints"),
    [
        pytest.param(*cell, marks=() if cell in RESUMED else pytest.mark.full)
        for cell in itertools.product(range(4), ("full", "sharded"))
    ],
)
def test_resumed_run_equals_the_uninterrupted_one_to_the_bit(zero_stage: int, checkpoints: str) -> None:
    settings = {"zero_stage": zero_stage, "checkpoints": checkpoints}
    for rank, (whole, *resumed) in enumerate(run_distributed(uninterrupted_and_resumed, 2, settings)):
        assert whole["step"] == 12
        for place, run in zip(("an epoch's end", "mid-epoch"), resumed, strict=True):
            for kind in ("weights", "moments"):
                assert list(run[kind]) == list(whole[kind])
                unequal = [name for name, tensor in whole[kind].items() if not torch.equal(tensor, run[kind][name])]
                assert not unequal, f"rank {rank}, resumed from {place}: other {kind}: {unequal}"
            assert (run["step"], run["epoch"], run["rate"]) == (whole["step"], whole["epoch"], whole["rate"])
            assert run["metrics"] == whole["metrics"]


def save_at(strategy: Strategy, folder: str) -> dict[str, Any]:
    """A run that leaves its mid-epoch checkpoint in ``folder``, under any strategy."""
    module, ending = classifier(schedule="step"), Ending()
    saving = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = trainer_for(strategy, max_epochs=3, callbacks=[ending, saving], enable_checkpointing=True)
    trainer.fit(module, datamodule=ClassifierData())
    barrier()
    return ending.state


def goes_on_from(path: Path, strategy: Strategy, ranks: int) -> dict[str, Any]:
    if strategy is None:
        return run_isolated(train, strategy, str(path), 99)
    return run_distributed(train, ranks, strategy, str(path), 99)[0]


def zero(stage: int, checkpoints: str = "full") -> dict[str, Any]:
    return {"zero_stage": stage, "checkpoints": checkpoints}


@pytest.mark.parametrize(
    ("checkpoints", "stage", "ranks", "then", "then_ranks"),
    [
        pytest.param("sharded", 3, 2, zero(1), 2, id="sharded-stage3-to-stage1"),
        pytest.param("sharded", 2, 2, zero(0), 2, marks=pytest.mark.full, id="sharded-stage2-to-stage0"),
        pytest.param("sharded", 3, 2, zero(2), 1, marks=pytest.mark.full, id="sharded-two-ranks-to-one"),
        pytest.param("sharded", 0, 1, zero(3), 2, id="sharded-one-rank-to-two"),
        pytest.param("full", 3, 2, None, 1, id="full-to-stock-single-process"),
        pytest.param("full", 1, 2, "ddp", 2, marks=pytest.mark.full, id="full-to-stock-ddp"),
        pytest.param("full", 2, 2, zero(3, "sharded"), 2, marks=pytest.mark.full, id="full-to-sharded-stage3"),
    ],
)
def test_another_layout_goes_on_where_this_one_stopped(
    tmp_path: Path, checkpoints: str, stage: int, ranks: int, then: Strategy, then_ranks: int
) -> None:
    whole = run_distributed(save_at, ranks, zero(stage, checkpoints), str(tmp_path))[0]
    resumed = goes_on_from(tmp_path / MID_EPOCH, then, then_ranks)
    assert_same(whole, resumed, "resumed")


@pytest.mark.parametrize(("stock", "stage"), [("ddp", 3), (None, 2), (None, 0)])
def test_a_stock_checkpoint_is_resumed_here(tmp_path: Path, stock: str | None, stage: int) -> None:
    if stock is None:
        whole = run_isolated(save_at, None, str(tmp_path))
    else:
        whole = run_distributed(save_at, 2, stock, str(tmp_path))[0]
    resumed = goes_on_from(tmp_path / MID_EPOCH, zero(stage), 2)
    assert_same(whole, resumed, "resumed")


def evaluate_saved_weights(checkpoints: str) -> list[Any]:
    strategy = zero(3, checkpoints)
    best = ModelCheckpoint("saved", monitor="val_loss", mode="min", save_weights_only=True)
    module = classifier()
    trainer = trainer_for(strategy, max_epochs=2, callbacks=[best], enable_checkpointing=True)
    trainer.fit(module, datamodule=ClassifierData())
    values = [float(best.best_model_score or 0.0)]
    values += [run["test_loss"] for run in trainer.test(ckpt_path="best", datamodule=ClassifierData(), verbose=False)]
    other = trainer_for(zero(1))
    [validated] = other.validate(
        classifier(seed=99), datamodule=ClassifierData(), ckpt_path=best.best_model_path, verbose=False
    )
    return [*values, validated["val_loss"]]


@Formats
def test_weights_only_checkpoints_serve_evaluation(checkpoints: str) -> None:
    for best, tested, validated in run_distributed(evaluate_saved_weights, 2, checkpoints):
        assert best == pytest.approx(tested, rel=1e-6)
        assert best == pytest.approx(validated, rel=1e-6)


def fit_from_weights_only() -> None:
    saving = ModelCheckpoint("saved", filename="weights", save_weights_only=True)
    trainer_for(zero(2), max_epochs=1, callbacks=[saving], enable_checkpointing=True).fit(
        classifier(), datamodule=ClassifierData()
    )
    barrier()
    with pytest.raises(KeyError, match="contains only the model"):
        train(zero(2), "saved/weights.ckpt")


def test_fit_does_not_resume_from_weights_alone() -> None:
    run_distributed(fit_from_weights_only, 2)


def resume_from_nowhere() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        train(zero(3), "nowhere.ckpt")


def test_missing_checkpoint_is_named() -> None:
    run_distributed(resume_from_nowhere, 2)
