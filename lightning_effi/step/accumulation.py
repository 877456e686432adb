"""Counting the batches of an accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from lightning_effi import _compat

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AccumulationWindow:
    """The batches between two optimizer steps.

    Lightning divides each loss by ``accumulate_grad_batches``, also in the last window of an epoch, which may be
    shorter, and where a step returned no loss. With ``exact`` the gradient is scaled back to the mean over the
    batches that were really in the window.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._batches = 0

    def count(self) -> None:
        """One more batch went through backward."""
        self._batches += 1

    def close(self, module: pl.LightningModule | None, optimizer: Optimizer) -> None:
        """Called before the gradients of a window are looked at, clipped and used."""
        batches, self._batches = self._batches, 0
        if not self._exact or module is None or not module.automatic_optimization or not batches:
            return
        divisor = module.trainer.accumulate_grad_batches
        if batches != divisor:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            _compat.local_tensor(parameter.grad).mul_(divisor / batches)
