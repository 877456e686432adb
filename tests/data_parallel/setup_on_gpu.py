"""One of two processes that share a GPU: sets up a module in ZeRO stage 3 and prints what that took on the device.

Output: ``<peak bytes on the device> <bytes of the whole model>``.
"""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_effi import EffiStrategy

WIDTH, LAYERS = 1024, 16


class Wide(pl.LightningModule):
    """Built by plain code: ``__init__`` makes all of it on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class PrintsPeak(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Wide) -> None:
        print(torch.cuda.max_memory_allocated(), pl_module.bytes, flush=True)
        os._exit(0)  # gloo, by which two processes can share a device, has no all-gather to go on with


if __name__ == "__main__":
    pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,  # so that both processes take the first device, over gloo: NCCL wants a device each
        strategy=EffiStrategy(3, process_group_backend="gloo"),
        logger=False,
        callbacks=[PrintsPeak()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Wide(), DataLoader(torch.ones(4, WIDTH), batch_size=2))
