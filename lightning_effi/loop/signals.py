"""Signals take effect between batches.

Lightning's handlers talk to the other ranks, and save a checkpoint, wherever the signal finds them: in the middle of a
collective that the others wait for, or of an optimizer step. Here SIGTERM sets the flag that the training loop looks at
before each batch, and SLURM's requeue signal is answered when all ranks have finished the same batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_effi.comm.agreement import Agreement
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.modules.undo import Undo

if TYPE_CHECKING:
    import lightning.pytorch as pl


class DeferredSignals:
    """Takes the place of Lightning's handlers from the start of training until Lightning restores the original ones."""

    def __init__(self) -> None:
        self._requeue: Callable[[], Any] | None = None
        self._requeue_asked = False
        self._agreement: Agreement | None = None

    def install(self, trainer: pl.Trainer, control_group: Any, undo: Undo) -> None:
        """Called when Lightning has registered its handlers, which puts back those before it by itself."""
        sigterm = lightning_compat.registered_signal_handler(signal.SIGTERM)
        if sigterm is not None:
            others = [handler for handler in sigterm if not lightning_compat.is_sigterm_notifier(handler)]
            signal.signal(signal.SIGTERM, _SigtermFlag(trainer, others))
        requeue_signal = lightning_compat.slurm_requeue_signal(trainer)
        handlers = None if requeue_signal is None else lightning_compat.registered_signal_handler(requeue_signal)
        if requeue_signal is not None and handlers is not None:
            handler: Any = signal.getsignal(requeue_signal)
            self._requeue = partial(handler, requeue_signal, None)
            self._agreement = None if control_group is None else Agreement(control_group)
            signal.signal(requeue_signal, self._ask_for_requeue)
            # Lightning has no strategy hook at the end of a batch, and at the start of the next one its loader has
            # moved on already.
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.append(after_batch := _AfterBatch(self.after_batch))
            undo.push(partial(callbacks.remove, after_batch))

    def after_batch(self) -> None:
        """Answer a requeue signal that any rank received during the batch; all ranks call this."""
        if self._requeue is None:
            return
        asked = self._requeue_asked
        if self._agreement is not None:
            asked = self._agreement.any([asked])[0]
        if asked:
            self._requeue_asked = False
            self._requeue()

    def _ask_for_requeue(self, _signum: int, _frame: FrameType | None) -> None:
        self._requeue_asked = True


class _AfterBatch(Callback):
    """Stands behind all other callbacks, so that what they did in the batch is saved too."""

    def __init__(self, after_batch: Callable[[], None]) -> None:
        self._after_batch = after_batch

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._after_batch()


class _SigtermFlag:
    """Lightning's handler without its broadcast; rank zero's flag reaches the others before the next batch."""

    def __init__(self, trainer: pl.Trainer, others: list[Any]) -> None:
        self._trainer = trainer
        self._others = others

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        first_time = lightning_compat.mark_sigterm(self._trainer)
        launcher = self._trainer.strategy.launcher
        if first_time and launcher is not None:
            launcher.kill(signum)
        for handler in self._others:
            if callable(handler):
                handler(signum, frame)
