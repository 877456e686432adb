"""Copies of a sharded module, of a part of it or of the Trainer are ordinary: whole, and of nobody's making."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import full_parameters, make_trainer, run_distributed


class Copied(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 1)
        self.listed = list(self.parameters())
        self.found: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.look_at_copies()

    def on_train_batch_end(self, *_: Any) -> None:
        self.look_at_copies()

    def look_at_copies(self) -> None:
        expected = full_parameters(self)
        copies = {"module": copy.deepcopy(self), "Trainer": copy.deepcopy(self.trainer).strategy._lightning_module}
        for what, copied in copies.items():
            if copied is None:
                continue
            mine = dict(copied.named_parameters())
            same = all(type(p) is nn.Parameter and torch.equal(p, expected[name]) for name, p in mine.items())
            follow = all(ours is theirs for ours, theirs in zip(copied.parameters(), copied.listed, strict=True))
            kinds = {type(child).__name__ for child in copied.modules()} == {type(m).__name__ for m in self.modules()}
            copied(torch.ones(2, 8)).sum().backward()
            right = {"values": same, "listed parameters": follow, "classes": kinds}
            self.found += [f"{what}: {name}" for name, is_right in right.items() if not is_right]
        x, whole = torch.ones(2, 8), copies["module"]
        blocks, head = copy.deepcopy(self.blocks), copy.deepcopy(self.head)
        if not torch.equal(head(blocks[0](x)), whole.head(whole.blocks[0](x))):
            self.found.append("parts")


def copy_in_hooks(zero_stage: int) -> tuple[list[str], int]:
    torch.manual_seed(3)
    module = Copied()
    trainer = make_trainer({"zero_stage": zero_stage}, 2, max_steps=2)
    trainer.fit(module, DataLoader(torch.randn(16, 8), batch_size=4))
    return module.found, trainer.global_step


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_copies_in_hooks_are_whole_ordinary_modules(zero_stage: int) -> None:
    assert run_distributed(copy_in_hooks, 2, zero_stage) == [([], 2)] * 2
