"""Evaluation: samples count once but for the documented padding, under ``no_grad`` and ``inference_mode`` alike."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.harness import make_trainer, run_distributed
from tests.harness.fitting import ALL_STAGES, Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models import encoder, gpt

SAMPLES = 21
CLASSES = 3
# Where the samples do not divide by the ranks, the sampler that Lightning injects repeats the first ones, in
# ``validate`` and ``test``; in ``predict`` it does not.
PADDED = [*range(SAMPLES), 0]


class Counting(pl.LightningModule):
    """A batch is ``(number [rows], class [rows])``; metrics are kept in the module, as torchmetrics advises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES, CLASSES, bias=False)
        nn.init.eye_(self.layer.weight)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.mean = torchmetrics.MeanMetric()
        self.total = torchmetrics.SumMetric()

    def predicted(self, number: Tensor) -> Tensor:
        return self.layer(F.one_hot(number.long() % CLASSES, CLASSES).float()).argmax(dim=1)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        number, target = batch
        self.accuracy(self.predicted(number), target)
        self.mean(number)
        self.total(torch.ones_like(number))
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean)
        self.log("total", self.total)
        self.log("value", number.mean(), sync_dist=True)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return batch[0]


def samples() -> TensorDataset:
    number = torch.arange(float(SAMPLES))
    return TensorDataset(number, torch.where(number < 8, number.long() % CLASSES, 0))


def evaluate_and_predict(zero_stage: int, world_size: int) -> tuple[dict[str, float], list[int]]:
    """Runs in a worker: the metrics of ``Trainer.test``, and the samples that ``Trainer.predict`` saw."""
    trainer = make_trainer({"zero_stage": zero_stage}, world_size)
    module, loader = Counting(), DataLoader(samples(), batch_size=4)
    [metrics] = trainer.test(module, loader, verbose=False)
    predictions = trainer.predict(module, loader)
    return metrics, torch.cat(predictions).int().tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("zero_stage", "world_size"), [(0, 2), (3, 2), (2, 1)], ids=["zero0-dp2", "zero3-dp2", "one-process"]
)
def test_all_samples_count_once_apart_from_padding(zero_stage: int, world_size: int) -> None:
    seen = PADDED if world_size > 1 else list(range(SAMPLES))
    right = [i for i in seen if i < 8 or i % CLASSES == 0]
    expected = {
        "accuracy": len(right) / len(seen),
        "mean": sum(seen) / len(seen),
        "total": len(seen),
        "value": sum(seen) / len(seen),
    }
    results = run_distributed(evaluate_and_predict, world_size, zero_stage, world_size)
    for metrics, _ in results:
        assert metrics == pytest.approx(expected, rel=1e-6)
    assert sorted(sample for _, predicted in results for sample in predicted) == list(range(SAMPLES))


class ForceInferenceMode(pl.Callback):
    """Validates under ``inference_mode``, as the Trainer does by default on GPUs; with gloo it takes ``no_grad``."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.run = torch.inference_mode()(loop.run)  # type: ignore[method-assign]


class ValidationLosses(pl.Callback):
    """``observation``: for each validation, its loss and whether it ran under ``inference_mode``."""

    def __init__(self) -> None:
        self.observation: list[tuple[float, bool]] = []

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observation.append((float(trainer.callback_metrics["val_loss"]), torch.is_inference_mode_enabled()))


class RowMeans(encoder.TokenClassifier):
    """Each row counts once, however many of its tokens have labels: means over ranks are then means over rows."""

    @override
    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, padding, labels = batch
        losses = F.cross_entropy(
            self(tokens, padding).transpose(1, 2), labels, ignore_index=encoder.IGNORED, reduction="none"
        )
        return (losses.sum(dim=1) / (labels != encoder.IGNORED).sum(dim=1)).mean()


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt-tied": (partial(gpt.GPT, blocks=2), partial(gpt.batches, 3)),
    "encoder": (partial(RowMeans, blocks=2), partial(encoder.batches, 3, rows=2)),
}
MODES: dict[str, tuple[Any, ...]] = {
    "no_grad": (ValidationLosses,),
    "inference_mode": (ForceInferenceMode, ValidationLosses),
}


def runs(zero_stage: int) -> dict[str, Fit]:
    """A sanity check, then a validation after every batch."""
    return {
        f"{model} {mode}": Fit(
            module,
            data,
            {"zero_stage": zero_stage},
            validation=data,
            callbacks=callbacks,
            trainer={"num_sanity_val_steps": 2, "val_check_interval": 1},
        )
        for model, (module, data) in MODELS.items()
        for mode, callbacks in MODES.items()
    }


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@ALL_STAGES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_validation_equals_single_process_and_so_does_the_training_after_it(
    zero_stage: int, model: str, mode: str
) -> None:
    expected = single_processes(runs(zero_stage))[f"{model} no_grad"]
    results = outcomes(zero_stage)[f"{model} {mode}"]
    assert_outcomes_equal(results, expected)
    for outcome in results:
        ours, theirs = _validations(outcome), _validations(expected)
        assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in theirs], rel=1e-7)
        assert len(ours) == 4
        assert all(inference == (mode == "inference_mode") for _, inference in ours)


def _validations(outcome: Outcome) -> list[tuple[float, bool]]:
    return next(observation for observation in outcome.observations if observation)
