"""What counts updates stands still where an update was skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import WeightAveraging

from lightning_effi.compat import lightning as lightning_compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.precision import EffiPrecision


class SkippedSteps:
    """Holds back schedulers and averages of weights after an overflow.

    Lightning asks for an optimizer step at the end of each window, counts it in ``global_step`` and moves step-interval
    schedulers; that the precision plugin left the step out does not reach it. Until :meth:`remove`, schedulers wait
    for the next update that takes place, and ``WeightAveraging`` does not average the same weights twice.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def install(self, trainer: pl.Trainer, precision: EffiPrecision) -> None:
        """Watch a run; does nothing where no step is ever skipped."""
        self.remove()
        if precision.scaler is None:
            return
        self._undo.append(lightning_compat.hold_back_schedulers(trainer, lambda: precision.last_step_skipped))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                self._hold_back(callback, precision)

    def remove(self) -> None:
        """Put back what was replaced."""
        while self._undo:
            self._undo.pop()()

    def _hold_back(self, callback: WeightAveraging, precision: EffiPrecision) -> None:
        original = callback.should_update

        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            if step_idx is not None and precision.last_step_skipped:
                return False
            return original(step_idx=step_idx, epoch_idx=epoch_idx)

        callback.should_update = should_update  # type: ignore[method-assign]
        self._undo.append(lambda: callback.__dict__.pop("should_update", None))
