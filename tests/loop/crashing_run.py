"""A training script, started as a user starts it, that goes wrong: ``python crashing_run.py <fault> <notes folder>``.

The rank at fault leaves the time of the fault in the notes folder.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_effi import EffiStrategy

WIDTH = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "sample": {"zero_stage": 2},
    "step": {"zero_stage": 2},
    "skipped block": {"zero_stage": 3},
    "last stage": {"pipeline_parallel_size": 2, "microbatches": 2},
}


def note_fault(notes: Path) -> None:
    (notes / "fault").write_text(str(time.monotonic()))


def shorten_timeout(strategy: EffiStrategy, seconds: float = 5) -> None:
    """From here on, collectives wait for ``seconds`` only; the start of the processes may take longer than that."""
    groups = [dist.group.WORLD, strategy.data_parallel_group, *strategy.device_mesh.get_all_groups()]
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class Samples(Dataset[Tensor]):
    def __init__(self, fault: str, notes: Path) -> None:
        self.fault, self.notes = fault, notes

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        if self.fault == "sample" and index == 13:
            note_fault(self.notes)
            raise OSError("sample 13 cannot be read")
        return torch.full((WIDTH,), float(index))


class Module(pl.LightningModule):
    def __init__(self, fault: str, notes: Path) -> None:
        super().__init__()
        self.fault, self.notes = fault, notes
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def on_train_start(self) -> None:
        if self.fault == "skipped block":
            shorten_timeout(self.trainer.strategy)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        third = batch_idx == 2
        if third and self.fault == "step" and self.global_rank == 0:
            note_fault(self.notes)
            raise ArithmeticError("the loss of batch 2 is wrong")
        skips = third and self.fault == "skipped block" and self.global_rank == 1
        if skips:
            note_fault(self.notes)
        for layer in self.layers[: 2 if skips else 3]:
            batch = layer(batch)
        if third and self.fault == "last stage":  # no other stage gets here
            note_fault(self.notes)
            raise KeyError("no such class")
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(fault: str, notes: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=EffiStrategy(**SETTINGS[fault], timeout=300),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(fault, notes), DataLoader(Samples(fault, notes), batch_size=2))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
