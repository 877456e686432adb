"""Packed projections: whole checkpoints hold the rows of a single process, and another number of ranks goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import BatchList, full_tensor, make_trainer, run_distributed, run_isolated
from tests.models import MODELS
from tests.models.gpt import GPT, batches


class GateUp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Packed(GPT):
    """Query, key and value in one layer, gate and up in another."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(blocks=2, **settings)
        for block in self.blocks:
            block.mlp = GateUp(16)


def make(kind: str) -> tuple[pl.LightningModule, list[Any]]:
    pl.seed_everything(5, verbose=False)
    if kind == "multihead":
        case = MODELS["encoder"]
        return case.module(optimizer="adamw"), case.batches(3)
    return Packed(optimizer="adamw"), batches(3)


def train(kind: str, tensor: int, directory: str, steps: int, resume: bool) -> dict[str, Tensor]:
    module, data = make(kind)
    strategy = {"tensor_parallel_size": tensor} if tensor else None
    trainer = make_trainer(strategy, max(tensor, 1), max_steps=steps, precision="64-true")
    loader = DataLoader(BatchList(data), batch_size=None)
    trainer.fit(module, loader, ckpt_path=f"{directory}/packed.ckpt" if resume else None)
    if not resume:
        trainer.save_checkpoint(f"{directory}/packed.ckpt")
    return {name: full_tensor(value) for name, value in module.state_dict().items()}


def launch(tensor: int, *args: Any) -> dict[str, Tensor]:
    if not tensor:
        return run_isolated(train, args[0], tensor, *args[1:])
    return run_distributed(train, tensor, args[0], tensor, *args[1:])[0]


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["multihead", pytest.param("chunks", marks=pytest.mark.full)])
def test_whole_checkpoint_is_that_of_one_process_and_other_sizes_go_on(
    kind: str, saved: int, loaded: int, tmp_path: Path
) -> None:
    (tmp_path / "single").mkdir()
    launch(0, kind, str(tmp_path / "single"), 2, False)
    launch(saved, kind, str(tmp_path), 2, False)
    single = torch.load(tmp_path / "single" / "packed.ckpt", weights_only=True)
    ours = torch.load(tmp_path / "packed.ckpt", weights_only=True)
    assert_close(ours["state_dict"], single["state_dict"])
    straight = launch(0, kind, str(tmp_path / "single"), 3, True)
    assert_close(launch(loaded, kind, str(tmp_path), 3, True), straight)
