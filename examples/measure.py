"""A callback that measures a run: tokens per second, and the bytes that one rank really holds."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class MeasureRun(pl.Callback):
    """Writes ``measurements.json`` into the run's folder when training ends.

    Bytes are counted over storages, so padding of shards counts and shared memory counts once. Gradients are measured
    before the last optimizer step, parameters and optimizer states after it. Next to each figure stands what the same
    tensors take when every rank holds them whole, as under DDP.

    Args:
        warmup_steps: Steps left out of the speed, since the first ones also allocate and plan.
    """

    def __init__(self, warmup_steps: int = 10) -> None:
        self.warmup_steps = warmup_steps
        self.tokens = 0
        self.started = 0.0
        self.seconds = 0.0
        self.gradients = {"held": 0, "whole": 0}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.warmup_steps:
            self.started = time.perf_counter()
        elif self.started:
            self.tokens += batch[:, 1:].numel() * trainer.world_size
            self.seconds = time.perf_counter() - self.started

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.gradients = measure(p.grad for p in pl_module.parameters() if p.grad is not None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states = [
            value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        result = {
            "strategy": type(trainer.strategy).__name__,
            "processes": trainer.world_size,
            "steps": trainer.global_step,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "bytes": {
                "parameters": measure(pl_module.parameters()),
                "gradients": self.gradients,
                "optimizer states": measure(value for value in states if isinstance(value, Tensor)),
            },
        }
        folder = trainer.log_dir  # asked on every rank, since it is broadcast from rank zero
        if trainer.is_global_zero and folder is not None:
            Path(folder, "measurements.json").write_text(json.dumps(result, indent=2) + "\n")


def measure(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of the storages behind ``tensors`` on this rank (``held``), and of the tensors unsharded (``whole``)."""
    storages: dict[int, int] = {}
    whole = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.data_ptr():  # an empty shard has no memory
            storages[storage.data_ptr()] = storage.nbytes()
        whole += tensor.numel() * tensor.element_size()
    return {"held": sum(storages.values()), "whole": whole}
