"""Gradients of low-precision copies of fp32 weights are added up in fp32: over windows, micro-batches and ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_effi import EffiPrecision
from tests.harness import full_tensor, make_trainer, run_distributed

# The first of PIECES gradients is 1, all others are 2^-9: in bf16, where 1 + 2^-9 is 1, their sum is 1.
PIECES = 64
SUM = 1 + (PIECES - 1) * 2.0**-9

WINDOW: dict[str, Any] = {"accumulate_grad_batches": PIECES}
PIECEWISE: dict[str, Any] = {"microbatches": {"count": PIECES, "weight": "samples"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0, window": {"zero_stage": 0},
    "zero1, window": {"zero_stage": 1},
    "zero2, window": {"zero_stage": 2},
    "zero2, window, one message": {"zero_stage": 2, "gradient_sync": "last"},
    "zero3, window": {"zero_stage": 3},
    "tp2, window": {"tensor_parallel_size": 2},
    "zero1, micro-batches": {"zero_stage": 1, **PIECEWISE},
    "tp2, micro-batches": {"tensor_parallel_size": 2, **PIECEWISE},
    "pp2, micro-batches": {"pipeline_parallel_size": 2, **PIECEWISE},
}


class Layer(nn.Module):
    """``up`` changes nothing, ``down`` gives nothing, and its gradient is that of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        nn.init.eye_(self.up.weight)
        nn.init.zeros_(self.down.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Model(pl.LightningModule):
    """``seen``: what the gradient of a weight is on average."""

    seen = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, pull = batch
        for block in self.blocks:
            x = block(x)
        return (x.sum(-1) * pull).mean()

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.blocks[0].down.weight.grad
        self.seen = float(full_tensor(gradient).float().mean()) if gradient is not None else self.seen

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def gradient(layout: dict[str, Any], world_size: int) -> float:
    pulls = torch.full((PIECES,), 2.0**-9)
    pulls[0] = 1.0
    batches = [(torch.ones(2, 16), pull.repeat(2) * PIECES) for pull in pulls]
    if "microbatches" in layout:
        batches = [(torch.ones(PIECES, 16), pulls * PIECES)]
    plugin = EffiPrecision("bf16-true", master_weights=True)
    trainer = make_trainer(
        {**layout, "precision_plugin": plugin}, world_size, max_epochs=1, use_distributed_sampler=False,
        **({} if "microbatches" in layout else WINDOW),
    )  # fmt: skip
    module = Model()
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module.seen


def on_two() -> dict[str, float]:
    return {name: gradient(layout, 2) for name, layout in LAYOUTS.items()}


@cache
def found() -> list[dict[str, float]]:
    return run_distributed(on_two, 2, timeout=120.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_gradients_count_beside_large_ones(layout: str) -> None:
    assert max(rank[layout] for rank in found()) == pytest.approx(SUM, abs=2e-3)


def test_small_gradients_count_in_one_process() -> None:
    assert run_distributed(gradient, 1, {}, 1) == [pytest.approx(SUM, abs=2e-3)]
