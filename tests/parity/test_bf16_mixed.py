"""bf16-mixed means what it means in stock Lightning: the same dtypes at the same places, and the same loss curve."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.harness import Training, TrainingRecord, run, run_reference
from tests.models import MODELS

NORMS = (nn.LayerNorm, nn.BatchNorm2d)
CURVE_STEPS = 20
# Where numbers are rounded to bf16 (8 bits) depends on the order of summation. For scale: over these steps the curve of
# stock bf16-mixed is up to 0.003 away from that of fp32.
CURVE_TOLERANCE = 0.01


class DtypeObserver(pl.Callback):
    """Notes dtypes during the first training step, by place.

    ``batch``: what the module's own loss function is given; ``loss``: what it returns; ``block i``: the residual
    stream that block i returns; ``norm <name>``: what a normalisation returns; ``parameter``/``gradient`` dtypes at
    the optimizer step.
    """

    def __init__(self, blocks: str) -> None:
        self.blocks = blocks
        self.observation: dict[str, Any] = {}
        self._handles: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for i, block in enumerate(pl_module.get_submodule(self.blocks)):
            self._observe(block, f"block {i}")
        for name, module in pl_module.named_modules():
            if isinstance(module, NORMS) or type(module).__name__.endswith("RMSNorm"):
                self._observe(module, f"norm {name}")
        own_loss = pl_module.loss

        def observed_loss(batch: Any) -> Tensor:
            self._note("batch", batch)
            loss = own_loss(batch)
            self._note("loss", loss)
            return loss

        pl_module.loss = observed_loss

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for name, parameter in pl_module.named_parameters():
            self._note(f"parameter {name}", parameter)
            self._note(f"gradient {name}", parameter.grad)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _observe(self, module: nn.Module, place: str) -> None:
        self._handles.append(module.register_forward_hook(lambda _module, _args, output: self._note(place, output)))

    def _note(self, place: str, value: Any) -> None:
        dtypes = tree_map_only(Tensor, lambda tensor: str(tensor.dtype).removeprefix("torch."), value)
        self.observation.setdefault(place, dtypes)


def bf16_training(model: str, zero_stage: int, **settings: Any) -> Training:
    case = MODELS[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = {"zero_stage": zero_stage}
    return Training(case.module, case.batches, strategy=strategy, world_size=2, precision="bf16-mixed", **settings)


def average(values: list[float], size: int) -> torch.Tensor:
    return torch.tensor(values).view(-1, size).mean(dim=1)


# Each model with one stage, each stage that computes otherwise with two models (1 computes as 2); all with `-m full`.
DTYPES = {"gpt-tied": 0, "encoder": 2, "llama": 3, "bert": 2, "vit-batchnorm": 3, "regressor": 0}


@pytest.mark.parametrize(
    ("model", "zero_stage"),
    [
        pytest.param(model, stage, marks=() if stage == chosen else pytest.mark.full)
        for model, chosen in DTYPES.items()
        for stage in range(4)
    ],
    ids=lambda value: f"zero{value}" if isinstance(value, int) else value,
)
def test_dtypes_equal_stock_bf16_mixed(model: str, zero_stage: int) -> None:
    training = bf16_training(
        model, zero_stage, steps=1, record_tensors=False, callbacks=(partial(DtypeObserver, MODELS[model].blocks),)
    )
    [expected] = run_reference(training).observations[0]
    record: TrainingRecord = run(training)
    assert expected["loss"] == "float32"
    assert {"block 0", "block 3"} <= set(expected)
    assert any(place.startswith("norm") for place in expected)
    for rank, [observed] in enumerate(record.observations):
        different = {
            place: (observed.get(place), dtype) for place, dtype in expected.items() if observed.get(place) != dtype
        }
        assert not different, f"rank {rank}: place → (dtype here, dtype of stock bf16-mixed): {different}"


@pytest.mark.parametrize(
    ("model", "zero_stage"),
    [
        ("gpt-tied", 0),
        ("vit-batchnorm", 3),
        *(
            pytest.param(model, stage, marks=pytest.mark.full)
            for model, stage in [("bert", 2), ("llama", 1), ("gpt2", 3), ("regressor", 3)]
        ),
    ],
    ids=lambda value: f"zero{value}" if isinstance(value, int) else value,
)
def test_loss_curve_is_near_stock_bf16_mixed(model: str, zero_stage: int) -> None:
    training = bf16_training(model, zero_stage, steps=CURVE_STEPS, learning_rate=0.05, record_tensors=False)
    ours, theirs = average(run(training).losses, 2), average(run_reference(training).losses, 2)
    torch.testing.assert_close(ours, theirs, rtol=CURVE_TOLERANCE, atol=CURVE_TOLERANCE)
    exact = average(run_reference(replace(training, precision="32-true")).losses, 2)
    assert not torch.equal(theirs, exact), "the precision flag had no effect"
