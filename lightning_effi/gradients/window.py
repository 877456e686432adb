"""Counting the batches of an accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_effi.compat import dtensor as dtensor_compat

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AccumulationWindow:
    """The batches between two optimizer steps.

    Lightning divides each loss by ``accumulate_grad_batches``, also in the last window of an epoch, which may be
    shorter, and where a step returned no loss. With ``exact`` the gradient is scaled back to the mean over the
    batches that were really in the window.

    Where each batch tells how much it counts for (:meth:`weigh`), its gradients are sums, and the mean over the whole
    window and all data-parallel ranks is taken here, once.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._batches = 0
        self._amount: float | None = None

    def count(self) -> None:
        """One more batch went through backward."""
        self._batches += 1

    def weigh(self, amount: float) -> None:
        """A batch whose gradients are not averaged counts for ``amount`` (its valid labels)."""
        self._amount = amount + (self._amount or 0.0)

    def close(self, module: pl.LightningModule | None, optimizer: Optimizer, group: Any) -> None:
        """Called before the gradients of a window are looked at, clipped and used.

        Args:
            module: whose window it is.
            optimizer: which is going to step.
            group: the data-parallel ranks, which have averaged their gradients by now, with a backend for CPU
                tensors; ``None`` for one process.
        """
        batches, self._batches = self._batches, 0
        amount, self._amount = self._amount, None
        if amount is not None:
            _scale(optimizer, _ranks_over_sum(amount, group))
            return
        if not self._exact or module is None or not module.automatic_optimization or not batches:
            return
        divisor = module.trainer.accumulate_grad_batches
        if batches != divisor:
            _scale(optimizer, divisor / batches)


@torch.no_grad()
def _scale(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                dtensor_compat.local_tensor(parameter.grad).mul_(factor)


def _ranks_over_sum(amount: float, group: Any) -> float:
    """What turns the mean over ranks of summed gradients into the mean over all that was counted."""
    if group is None:
        return 1.0 / amount if amount else 1.0
    total = torch.tensor(amount, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return dist.get_world_size(group) / float(total) if float(total) else 1.0
