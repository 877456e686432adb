"""Optimizers that could divide and skip on the device are treated like all others, and clipped like all others."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_effi import EffiPrecision, EffiStrategy
from tests.harness import BatchList
from tests.models.gpt import GPT, batches


class WithOptimizer(GPT):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(blocks=2)
        self.arguments = arguments

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, **self.arguments)


class OverflowsOnce(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 1:
            pl_module.norm.weight.grad[0] = float("inf")


def fit(accelerator: str, **arguments: Any) -> tuple[WithOptimizer, EffiPrecision]:
    pl.seed_everything(7, verbose=False)
    plugin = EffiPrecision("16-mixed", init_scale=1024.0)
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=EffiStrategy(),
        plugins=[plugin],
        max_steps=4,
        gradient_clip_val=0.1,
        callbacks=[OverflowsOnce()],
        **flags,
    )
    module = WithOptimizer(**arguments)
    trainer.fit(module, DataLoader(BatchList(batches(4)), batch_size=None))
    return module, plugin


def assert_equal_to_the_plain_one(accelerator: str, kind: str) -> None:
    (ours, plugin), (plain, _) = fit(accelerator, **{kind: True}), fit(accelerator, foreach=False)
    assert (plugin.loss_scale, plugin.skipped_steps) == (512.0, 1)
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_optimizer_steps_and_skips_as_the_plain_one(kind: str) -> None:
    assert_equal_to_the_plain_one("cpu", kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_optimizer_steps_and_skips_as_the_plain_one_on_a_gpu(kind: str) -> None:
    assert_equal_to_the_plain_one("gpu", kind)
