"""Activations live as long as the schedule says, and no longer."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_effi.config import Schedule
from lightning_effi.pipeline_parallel.planning.schedule import activation_bound, make_schedule
from tests.harness import make_trainer, run_distributed

MICROBATCHES = 8
STAGES_PER_RANK: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb1p": 1, "zbv": 2}


class Activations:
    """What one forward of a block has to remember for its backward."""

    alive: ClassVar[weakref.WeakSet[Activations]] = weakref.WeakSet()
    peak: ClassVar[int] = 0

    @classmethod
    def remember(cls) -> Activations:
        activations = cls()
        cls.alive.add(activations)
        cls.peak = max(cls.peak, len(cls.alive))
        return activations


class Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.activations = Activations.remember()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(Remembers.apply(x)) if x.requires_grad else self.linear(x)).tanh()


class Counting(pl.LightningModule):
    """One block a stage. The output holds the graph, as that of a step that returns its logits does."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        x = batch + self.start
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean(), "outputs": x}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peaks(ranks: int) -> dict[str, int]:
    found = {}
    for schedule, stages in STAGES_PER_RANK.items():
        strategy = {"pipeline_parallel_size": ranks, "pipeline": schedule, "microbatches": MICROBATCHES}
        trainer = make_trainer(strategy, ranks, max_epochs=1)
        rows = torch.randn(MICROBATCHES, 8, generator=torch.Generator().manual_seed(1))
        Activations.peak = 0
        trainer.fit(Counting(ranks * stages), DataLoader(rows, batch_size=MICROBATCHES))  # type: ignore[arg-type]
        assert not Activations.alive
        found[schedule] = Activations.peak
    return found


def test_activations_that_are_alive_at_once_are_those_of_the_schedule() -> None:
    ranks = 4
    for rank, found in enumerate(run_distributed(peaks, ranks, ranks)):
        planned = {name: make_schedule(name, ranks, MICROBATCHES).live_activations()[rank] for name in STAGES_PER_RANK}
        bound = {name: activation_bound(name, ranks, MICROBATCHES)[rank] for name in STAGES_PER_RANK}
        assert found == planned
        assert all(found[name] <= bound[name] for name in bound)
        assert found["1f1b"] == ranks - rank
