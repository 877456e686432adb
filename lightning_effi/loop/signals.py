"""Signals take effect between batches.

Lightning's handlers talk to the other ranks, and save a checkpoint, wherever the signal finds them: in the middle of a
collective that the others wait for, or of an optimizer step. Here SIGTERM is noted. It becomes the flag of Lightning's
loops when all ranks are about to begin the same batch, and have told each other. SLURM's requeue signal is answered
when all ranks have finished the same batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
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
        self._trainer: pl.Trainer | None = None
        self._sigterm: _SigtermNote | None = None

    def install(self, trainer: pl.Trainer, control_group: Any, undo: Undo) -> None:
        """Called when Lightning has registered its handlers, which puts back those before it by itself.

        Args:
            trainer: whose loops end.
            control_group: of all ranks; ``None`` where this process is the only one.
            undo: told how to take back what is changed around the loops.
        """
        self._trainer, self._agreement = trainer, None if control_group is None else Agreement(control_group)
        undo.push(self._forget)
        sigterm = lightning_compat.registered_signal_handler(signal.SIGTERM)
        if sigterm is not None:
            others = [handler for handler in sigterm if not lightning_compat.is_sigterm_notifier(handler)]
            self._sigterm = _SigtermNote(trainer, others, alone=self._agreement is None)
            signal.signal(signal.SIGTERM, self._sigterm)
        if self._agreement is not None:  # also where this rank has no handler: it answers the others
            undo.push(lightning_compat.before_training_batches(trainer, self._end_together))
        requeue_signal = lightning_compat.slurm_requeue_signal(trainer)
        handlers = None if requeue_signal is None else lightning_compat.registered_signal_handler(requeue_signal)
        if requeue_signal is not None and handlers is not None:
            handler: Any = signal.getsignal(requeue_signal)
            self._requeue = partial(handler, requeue_signal, None)
            signal.signal(requeue_signal, self._ask_for_requeue)
            # Lightning has no strategy hook at the end of a batch, and at the start of the next one its loader has
            # moved on already.
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.append(after_batch := _AfterBatch(self.after_batch))
            undo.push(partial(callbacks.remove, after_batch), "a callback behind all others")

    def before_evaluation_batch(self) -> None:
        """Where any rank was sent SIGTERM, let the evaluation inside of a fit end on all of them after this batch."""
        if self._trainer is not None and self._sigterm_anywhere():
            lightning_compat.mark_sigterm(self._trainer)

    def _end_together(self) -> None:
        if self._sigterm_anywhere():
            assert self._trainer is not None
            lightning_compat.mark_sigterm(self._trainer)
            raise SIGTERMException

    def _sigterm_anywhere(self) -> bool:
        received = self._sigterm is not None and self._sigterm.received
        return self._agreement is not None and self._agreement.any([received])[0]

    def _forget(self) -> None:
        self._trainer = self._sigterm = self._agreement = None

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


class _SigtermNote:
    """Lightning's handler without its broadcast, and with a note in place of the flag: no rank acts upon it alone."""

    def __init__(self, trainer: pl.Trainer, others: list[Any], *, alone: bool) -> None:
        self._trainer = trainer
        self._others = others
        self._alone = alone
        self.received = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        first_time, self.received = not self.received, True
        if self._alone:
            lightning_compat.mark_sigterm(self._trainer)
        launcher = self._trainer.strategy.launcher
        if first_time and launcher is not None:
            launcher.kill(signum)
        for handler in self._others:
            if callable(handler):
                handler(signum, frame)
