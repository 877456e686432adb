"""In which hooks ``trainer.world_size`` and torch's default group stand for the data-parallel ranks.

A value that a loss, an update or a metric could see is made in the steps, in the hooks around batches and epochs, and
where data and learning rates are prepared. What comes when a loop has ended, checkpoints and exceptions are about
processes and their files, and see all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_effi.comm.ranks import RankWords
from lightning_effi.modules.shadows import Shadows

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
SHARING_OUT = (
    "setup",
    "configure_model",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
_LOOPS = ("train", "validation", "test", "predict")
_AROUND = tuple(f"on_{loop}_{part}_{end}" for loop in _LOOPS for part in ("batch", "epoch") for end in ("start", "end"))
UPDATES = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", *_AROUND)
PREPARING = (
    "configure_optimizers",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_fit_start",
    "on_train_start",
    "on_validation_start",
    "on_test_start",
    "on_predict_start",
)


AT_THE_END = ("on_validation_end", "on_test_end", "on_predict_end", "on_train_end", "on_fit_end")
_AT_THE_START = ("on_train_start", "on_validation_start", "on_test_start", "on_predict_start")


class UserHooks:
    """Tells which hook of a module, its data and its callbacks is running, for the length of a run."""

    def __init__(self, words: RankWords) -> None:
        self._words = words
        self._shadows = Shadows()

    def install(
        self,
        module: pl.LightningModule,
        datamodule: pl.LightningDataModule | None,
        callbacks: Iterable[pl.Callback],
    ) -> None:
        """Before the first hook of a run that knows its processes; where all ranks have batches, there is no need."""
        self.remove()
        self._shadows = Shadows()
        if not self._words.differ:
            return
        sharing, plain = partial(self._words.data_parallel, shares_out=True), self._words.data_parallel
        for name in STEPS:
            self._put(module, pl.LightningModule, name, partial(self._words.step, name))
        self._shadows.put(module, "backward", plain)  # of collectives with gradients, too
        for name in (*UPDATES, *PREPARING):
            self._put(module, pl.LightningModule, name, plain)
        for owner, base in ((module, pl.LightningModule), (datamodule, pl.LightningDataModule)):
            for name in SHARING_OUT:
                self._put(owner, base, name, sharing)
        for name in (*AT_THE_END, "on_save_checkpoint"):
            self._put(module, pl.LightningModule, name, self._words.after_loops)
        for callback in callbacks:
            if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
                continue  # whole loops run in their hooks
            for name in ("setup", *UPDATES):
                self._put(callback, pl.Callback, name, plain)
            for name in (*_AT_THE_START, *AT_THE_END, "on_save_checkpoint"):
                self._put(callback, pl.Callback, name, self._words.after_loops)

    def remove(self) -> None:
        """Leave everything as it was before the run."""
        self._shadows.remove()

    def _put(self, owner: Any, base: type, name: str, context: Any) -> None:
        """Only where somebody has written the hook."""
        own = getattr(type(owner), name, None)
        if owner is not None and (name in vars(owner) or (own is not None and own is not getattr(base, name, None))):
            self._shadows.put(owner, name, context)
