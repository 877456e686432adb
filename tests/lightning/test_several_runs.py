"""Several runs in one process, with other process groups or other numbers of processes each time."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

from lightning_effi import EffiPrecision, EffiStrategy
from tests.harness import run_distributed, run_isolated

STRATEGIES: list[Any] = [
    {"zero_stage": 3},
    "ddp",
    {"zero_stage": 2},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"zero_stage": 1},
]


class Blocks(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)])
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layer(x))


def fit(devices: int, strategy: Any, **flags: Any) -> bool:
    made = EffiStrategy(**strategy) if isinstance(strategy, dict) else strategy
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=made, max_steps=1, enable_model_summary=False, **quiet, **flags
    )
    trainer.fit(Blocks(), DataLoader(torch.randn(8, 32), batch_size=4))
    return trainer.state.finished


def destroy_between_runs() -> list[bool]:
    rank = dist.get_rank()
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            Path("port").write_text(str(free.getsockname()[1]))
    dist.barrier()
    dist.destroy_process_group()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": Path("port").read_text(), "LOCAL_RANK": str(rank)}
    os.environ.update(address | {"WORLD_SIZE": "2", "NODE_RANK": "0"})  # as Lightning starts its processes
    finished = []
    for number, strategy in enumerate(STRATEGIES):
        finished.append(fit(2, strategy, plugins=[LightningEnvironment()]))
        dist.destroy_process_group()
        Path(f"{number}.{rank}").touch()  # a rank that is faster would be served by the other's old store, as with ddp
        while not Path(f"{number}.{1 - rank}").exists():
            time.sleep(0.01)
    return finished


def test_process_groups_may_be_destroyed_between_runs() -> None:
    assert run_distributed(destroy_between_runs, 2, fresh=True) == [[True] * len(STRATEGIES)] * 2


def one_process_then_two() -> tuple[bool, bool, list[str], bool]:
    before = dict(os.environ)
    first = fit(1, {}, plugins=[EffiPrecision("bf16-true", master_weights=True)])
    changed = [key for key in os.environ if before.get(key) != os.environ[key]]
    left = dist.is_initialized()
    return first, left, changed, fit(2, {"start_method": "fork"})


def test_one_process_with_master_weights_leaves_no_process_group_to_those_forked_from_it() -> None:
    assert run_isolated(one_process_then_two, fresh=True) == (True, False, [], True)
