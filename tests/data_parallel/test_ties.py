"""Weights that stand in two places stay one tensor, wherever the tie is made and whatever it crosses."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.modules import find_blocks
from tests.harness.fitting import Fit, assert_equals_single_process
from tests.models.gpt import CONTEXT, VOCABULARY, Block

Place = Literal["init", "setup", "configure_model"]
# Two tables of this size are worth shard groups of their own; the tied one still may not have one.
ROWS, WIDTH = 4096, 16


class ManyTies(pl.LightningModule):
    """Tied: the head with one table of a list of embeddings, and one linear layer of the first with the last block."""

    def __init__(self, tied_in: Place) -> None:
        super().__init__()
        self.tied_in = tied_in
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(Block(WIDTH, 2) for _ in range(3))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)
        self._tie("init")

    def _tie(self, place: Place) -> None:
        if place == self.tied_in:
            self.head.weight = self.tables[0].weight
            self.blocks[2].mlp[0].weight = self.blocks[0].mlp[0].weight

    def setup(self, stage: str) -> None:
        self._tie("setup")

    def configure_model(self) -> None:
        self._tie("configure_model")

    def assert_tied(self) -> None:
        assert self.head.weight is self.tables[0].weight
        assert self.blocks[2].mlp[0].weight is self.blocks[0].mlp[0].weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.assert_tied()
        x = self.tables[0](batch[:, :-1]) + self.tables[1](batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator) for _ in range(2)]


class TiesAfterTraining(pl.Callback):
    """Bytes of the parameters of this rank, each storage once, and the saved weights that are tied."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: ManyTies) -> None:
        pl_module.assert_tied()

    def on_train_end(self, trainer: pl.Trainer, pl_module: ManyTies) -> None:
        pl_module.assert_tied()
        state = trainer.strategy.lightning_module_state_dict()
        pairs = [("head.weight", "tables.0.weight"), ("blocks.2.mlp.0.weight", "blocks.0.mlp.0.weight")]
        equal = [torch.equal(state[a], state[b]) for a, b in pairs] if state else None
        storages = {
            local.untyped_storage().data_ptr(): local.untyped_storage().nbytes()
            for local in map(dtensor_compat.local_tensor, pl_module.parameters())
        }
        planned = trainer.strategy.plan.bytes_per_rank["parameters"] if hasattr(trainer.strategy, "plan") else None
        self.observation: dict[str, Any] = {"equal": equal, "bytes": sum(storages.values()), "planned": planned}


@pytest.mark.parametrize(
    ("tied_in", "zero_stage"),
    [
        ("init", 0),
        pytest.param("init", 1, marks=pytest.mark.full),
        pytest.param("init", 2, marks=pytest.mark.full),
        ("init", 3),
        ("setup", 1),
        ("setup", 3),
        ("configure_model", 2),
        ("configure_model", 3),
    ],
)
def test_ties_survive_wherever_they_are_made(tied_in: Place, zero_stage: int) -> None:
    run = Fit(partial(ManyTies, tied_in), batches, {"zero_stage": zero_stage}, callbacks=(TiesAfterTraining,))
    outcomes = assert_equals_single_process(run)
    assert outcomes[0].observations[0]["equal"] == [True, True]
    for outcome in outcomes:
        [observed] = outcome.observations
        assert observed["bytes"] == observed["planned"], "a tied weight is held, or planned, twice"


def test_units_that_share_a_weight_stay_with_the_root() -> None:
    blocks = [block.name for block in find_blocks(ManyTies("init"))]
    assert blocks == ["tables.1", "blocks.1"]
