"""Manual optimization with a loss scale: several optimizers, clipping by hand, gradients that wait while it moves."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_effi import EffiPrecision
from tests.harness.fitting import Fit, Outcome
from tests.harness.parity import assert_tensors_close
from tests.harness.several_fits import fit_several, single_processes

WIDTH = 8
CLIP = 0.05
NOISE = 2e-2


class Staggered(pl.LightningModule):
    """One optimizer steps after every batch, the other after every second one, unreduced until then."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.slow = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.fast = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        slow, fast = self.optimizers()
        steps = batch_idx % 2 == 1
        with slow.toggle_model(sync_grad=steps):
            self.manual_backward((self.slow(batch) - batch).square().mean() / 2)
            if steps:
                self.clip_gradients(slow, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
                slow.step()
                slow.zero_grad()
        with fast.toggle_model():
            self.manual_backward((self.fast(batch) + batch).square().mean())
            self.clip_gradients(fast, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            fast.step()
            fast.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.slow.parameters(), lr=0.5),
            torch.optim.AdamW(self.fast.parameters(), lr=0.01, eps=1e-4),
        ]


def batches() -> list[Tensor]:
    return list(torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(3)))


class Scales(pl.Callback):
    def __init__(self) -> None:
        self.observation: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.observation.append(getattr(trainer.strategy.precision_plugin, "loss_scale", 1.0))


# grows after every batch; with overflows, the first one is skipped by both optimizers
SETTINGS = {"growing": {"init_scale": 256.0, "growth_interval": 1}, "static": {"growth_factor": 1, "backoff_factor": 1}}


def runs() -> dict[str, Fit]:
    return {
        f"{name}, zero{stage}": Fit(
            Staggered,
            batches,
            {"zero_stage": stage, "precision_plugin": EffiPrecision("16-mixed", **settings)},
            precision="32-true",
            callbacks=(Scales,),
        )
        for name, settings in SETTINGS.items()
        for stage in range(4)
    }


@cache
def outcomes() -> dict[str, list[Outcome]]:
    return fit_several(runs())


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_equal_fp32_in_a_single_process(zero_stage: int, name: str) -> None:
    key = f"{name}, zero{zero_stage}"
    expected = single_processes({key: runs()["static, zero0"]})[key]
    for outcome in outcomes()[key]:
        scales = [256.0 * 2**batch for batch in range(1, 7)] if name == "growing" else [65536.0] * 6
        assert outcome.observations[-1] == scales or scales in outcome.observations
        for step, (ours, theirs) in enumerate(zip(outcome.gradients, expected.gradients, strict=True), start=1):
            assert_tensors_close(f"gradients of step {step}", ours, theirs, NOISE)
        for batch, (ours, theirs) in enumerate(zip(outcome.parameters, expected.parameters, strict=True)):
            assert_tensors_close(f"after batch {batch}", ours, theirs, NOISE, expected.parameters[0] if batch else None)
        assert outcome.global_step == expected.global_step == 9
