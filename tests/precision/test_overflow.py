"""An overflow that a single rank sees stops all of them, and all move the loss scale alike."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_effi import EffiPrecision
from tests.harness import BatchList, make_trainer, run_distributed
from tests.models.gpt import GPT, batches
from tests.precision.runs import LAYOUTS, Overflows

SETTINGS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 2}
OVERFLOWS = (1, 2, 6)
# after each step: scale, steps skipped, whether the weights changed
TABLE = [
    (64.0, 0, True),
    (64.0, 1, False),  # the first of two overflows
    (32.0, 2, False),
    (32.0, 2, True),
    (32.0, 2, True),
    (64.0, 2, True),  # three good steps
    (64.0, 3, False),  # growth had put the hysteresis back
    (64.0, 3, True),
    (64.0, 3, True),
    (128.0, 3, True),
]
SAVED_AFTER = 5  # in the middle of an interval


class Save(pl.Callback):
    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint("saved.ckpt")


def fit(strategy: dict[str, Any], victim: int, load: str | None = None) -> Any:
    """The table of a run, as seen by this rank."""
    pl.seed_everything(7, verbose=False)
    overflows = Overflows(victim, OVERFLOWS)
    trainer = make_trainer(
        {**strategy, "precision_plugin": EffiPrecision("16-mixed", **SETTINGS)},
        dist.get_world_size(),
        callbacks=[overflows] if load else [overflows, Save()],
        max_steps=len(TABLE),
        max_epochs=-1,
        gradient_clip_val=0.1,
    )
    trainer.fit(GPT(blocks=2), DataLoader(BatchList(batches(40, rows=4)), batch_size=None), ckpt_path=load)
    assert trainer.global_step == len(TABLE), "a skipped step counts, as in stock Lightning"
    return overflows.observation


def fit_for_each_victim(strategy: dict[str, Any]) -> dict[str, Any]:
    size = dist.get_world_size()
    tables = {f"overflow on rank {victim}": fit(strategy, victim) for victim in range(size)}
    return {**tables, "resumed": TABLE[:SAVED_AFTER] + fit(strategy, size - 1, load="saved.ckpt")}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("zero0", marks=pytest.mark.full),
        "zero3",
        "tp2",
        "pp2",
        pytest.param("dp2-tp2", marks=pytest.mark.full),
        pytest.param("zero1", marks=pytest.mark.full),
        pytest.param("zero2", marks=pytest.mark.full),
        pytest.param("dp2-pp2", marks=pytest.mark.full),
        pytest.param("tp2-pp2", marks=pytest.mark.full),
    ],
)
def test_all_ranks_skip_and_move_the_scale_alike(layout: str) -> None:
    world_size, strategy = LAYOUTS[layout]
    for rank, tables in enumerate(run_distributed(fit_for_each_victim, world_size, strategy, timeout=150.0)):
        assert len(tables) == world_size + 1
        for name, table in tables.items():
            assert table == TABLE, f"{name}, seen by rank {rank}"
