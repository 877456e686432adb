"""validate, test and predict, before, between and after fits of the same trainer and module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.lightning.classifier import ClassifierData, dataset
from tests.lightning.sides import (
    EACH_STAGE,
    Strategy,
    assert_same_as_single_process,
    classifier,
    metrics,
    trainer_for,
    weights,
)


def evaluate_all_around(strategy: Strategy) -> dict[str, Any]:
    module, data = classifier(), ClassifierData()
    trainer = trainer_for(strategy, max_epochs=1)
    seen: dict[str, Any] = {"before": trainer.validate(module, datamodule=data, verbose=False)}
    trainer.fit(module, datamodule=data)
    seen["first fit"] = weights(module)
    seen["test"] = trainer.test(module, datamodule=data, verbose=False)
    seen["test has a gradient"] = any(parameter.grad is not None for parameter in module.parameters())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data)
    seen["metrics"], seen["step"] = metrics(trainer), trainer.global_step
    seen["second fit"] = weights(module)
    seen["after"] = trainer.validate(module, datamodule=data, verbose=False)
    seen["another trainer"] = trainer_for(strategy).test(module, datamodule=data, verbose=False)
    return seen


@EACH_STAGE
def test_one_trainer_evaluates_and_goes_on_training(zero_stage: int) -> None:
    observed = assert_same_as_single_process(evaluate_all_around, zero_stage)[0]
    assert observed["step"] == 8
    assert not torch.equal(observed["first fit"]["head.weight"], observed["second fit"]["head.weight"])


def predict_after_fit(zero_stage: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module, data = classifier(), ClassifierData()
    trainer = trainer_for({"zero_stage": zero_stage}, max_epochs=1)
    trainer.fit(module, datamodule=data)
    predictions = trainer.predict(module, datamodule=data)
    assert predictions is not None
    return torch.cat([row for batch in predictions for row in batch.split(1)]), weights(module)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_predict_returns_what_the_trained_module_says(zero_stage: int) -> None:
    for rank, (predictions, trained) in enumerate(run_distributed(predict_after_fit, 2, zero_stage)):
        module = classifier()
        module.load_state_dict(trained, strict=False)
        with torch.no_grad():
            expected = module(dataset(16, seed=2).tensors[0])[rank::2]
        torch.testing.assert_close(predictions, expected, rtol=1e-5, atol=1e-6)
