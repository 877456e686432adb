"""What users do in the lines after ``trainer.fit``: the module is an ordinary one again, with the trained weights."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.harness import run_distributed
from tests.lightning.classifier import Classifier, ClassifierData, dataset
from tests.lightning.sides import (
    EACH_STAGE,
    Strategy,
    assert_same_as_single_process,
    barrier,
    classifier,
    metrics,
    trainer_for,
    weights,
)


def go_on_by_hand(strategy: Strategy, then: Strategy) -> dict[str, Any]:
    module, data = classifier(), ClassifierData()
    trainer = trainer_for(strategy, max_epochs=1)
    trainer.fit(module, datamodule=data)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x, y = dataset(16, seed=2).tensors
    loss = torch.nn.functional.cross_entropy(module(x), y)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    copied = copy.deepcopy(module.cpu().eval())
    module.zero_grad()
    trainer.save_checkpoint("after.ckpt")
    barrier()
    saved = torch.load("after.ckpt", weights_only=True)
    second = trainer_for(then if strategy is not None else None, max_epochs=1)
    second.fit(module.train(), datamodule=data)
    return {
        "class": (type(module).__name__, type(module) is Classifier, isinstance(trainer.lightning_module, Classifier)),
        "types": sorted({type(value).__name__ for value in [*state.values(), *module.parameters()]}),
        "state": state,
        "loss": float(loss),
        "gradients": gradients,
        "copy": float(torch.nn.functional.cross_entropy(copied(x), y)),
        "saved": saved["state_dict"],
        "saved step": saved["global_step"],
        "second fit": weights(module),
        "second metrics": metrics(second),
    }


@pytest.mark.parametrize(
    ("zero_stage", "then"),
    [
        (0, {"zero_stage": 3}),
        pytest.param(1, "ddp", marks=pytest.mark.full),
        (2, {"zero_stage": 0}),
        pytest.param(3, {"zero_stage": 2}, marks=pytest.mark.full),
        (3, "ddp"),
    ],
    ids=["stage0-then-stage3", "stage1-then-ddp", "stage2-then-stage0", "stage3-then-stage2", "stage3-then-ddp"],
)
def test_the_module_is_an_ordinary_one_again(zero_stage: int, then: Strategy) -> None:
    observed = assert_same_as_single_process(go_on_by_hand, zero_stage, then)[0]
    assert observed["types"] == ["Parameter", "Tensor"]
    assert observed["saved step"] == 4


class FailOnce(pl.Callback):
    def __init__(self) -> None:
        self.failed = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("enough")


def fit_again_after_an_error(strategy: Strategy) -> dict[str, Any]:
    module = classifier()
    trainer = trainer_for(strategy, max_epochs=2, callbacks=[FailOnce()])
    with pytest.raises(ValueError, match="enough"):
        trainer.fit(module, datamodule=ClassifierData())
    trainer.fit(module, datamodule=ClassifierData())
    return {"step": trainer.global_step, "metrics": metrics(trainer), "weights": weights(module)}


@EACH_STAGE
def test_the_same_trainer_goes_on_after_an_error(zero_stage: int) -> None:
    assert assert_same_as_single_process(fit_again_after_an_error, zero_stage)[0]["step"] > 1


def new_trainer_after_an_error() -> list[bool]:
    module = classifier()
    with pytest.raises(ValueError, match="enough"):
        trainer_for({"zero_stage": 3}, callbacks=[FailOnce()]).fit(module, datamodule=ClassifierData())
    plain = [not hasattr(parameter, "full_tensor") for parameter in module.parameters()]
    trainer_for({"zero_stage": 3}, max_epochs=1).fit(module, datamodule=ClassifierData())
    return plain


def test_a_module_that_all_ranks_failed_with_is_whole_and_taken_by_another_trainer() -> None:
    for plain in run_distributed(new_trainer_after_an_error, 2, fresh=True):
        assert plain
        assert all(plain)
