"""What a module's own code reads from gradients of split layers is that of the whole, or an error, never one rank's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.behaviours.test_gradients_seen_by_hooks import READERS
from tests.harness import make_trainer, run_distributed, run_isolated
from tests.models.gpt import GPT, batches


class Read(pl.Callback):
    """``observation``: for each step, the value of each reader, or the error that it ended with."""

    def __init__(self) -> None:
        self.observation: list[dict[str, Any]] = []

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.observation.append({name: _value_or_error(read, pl_module) for name, read in READERS.items()})


def _value_or_error(read: Any, module: pl.LightningModule) -> Any:
    try:
        return read(module)
    except (RuntimeError, TypeError) as error:
        return error.args[0]


def observe(strategy: Any, world_size: int) -> list[dict[str, Any]]:
    pl.seed_everything(7, verbose=False)
    module, read = GPT(blocks=2), Read()
    parts = max(1, world_size // 2)
    part = dist.get_rank() // 2 if world_size > 1 else 0
    data = [batch.chunk(parts)[part] for batch in batches(2)]
    trainer = make_trainer(strategy, world_size, callbacks=[read], max_steps=2, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return read.observation


@pytest.mark.parametrize("zero_stage", [None, 3], ids=["tp2", "zero3-tp2"])
def test_the_value_read_is_that_of_the_whole_tensor(zero_stage: int | None) -> None:
    strategy, world_size = {"tensor_parallel_size": 2}, 2
    if zero_stage is not None:
        strategy, world_size = {**strategy, "zero_stage": zero_stage}, 4
    expected = run_isolated(observe, None, 1)
    for observed in run_distributed(observe, world_size, strategy, world_size):
        for ours, theirs in zip(observed, expected, strict=True):
            wrong = {
                name: (value, theirs[name])
                for name, value in ours.items()
                if not isinstance(value, str) and value != pytest.approx(theirs[name], rel=1e-5, abs=1e-9)
            }
            assert not wrong
            assert sum(isinstance(value, str) for value in ours.values()) < len(READERS) / 2
