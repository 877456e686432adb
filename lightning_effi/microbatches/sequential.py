"""Micro-batches one after the other: forward and backward of each, then the next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_effi.microbatches.evidence import evidence_of
from lightning_effi.microbatches.logs import StepResult, captured_logs
from lightning_effi.microbatches.split import Piece
from lightning_effi.modules.draws import SameForAllRows
from lightning_effi.modules.restore import loss_of, same_randomness
from lightning_effi.modules.state_changes import changed_by

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.strategy import EffiStrategy


class SequentialRunner:
    """Runs the pieces of a batch on this rank's engine."""

    def __init__(self, strategy: EffiStrategy) -> None:
        self._strategy = strategy

    def prepare(self, piece: Piece, args: Sequence[Any], microbatches: int) -> None:
        """The module runs as it is."""

    def fitting(self, microbatches: int) -> int:
        """Any number will do."""
        return microbatches

    def train(
        self, pieces: Sequence[Piece], weights: Sequence[float], scale: float, args: Sequence[Any]
    ) -> list[StepResult]:
        """Forward and backward of each piece; gradients add up as in an accumulation window, reduced after the last.

        Args:
            pieces: the cut batch.
            weights: share of each piece in the loss.
            scale: further factor of the loss, the loss scale included.
            args: arguments of ``training_step`` after the batch.
        """
        strategy, results = self._strategy, []
        module, engine = strategy.lightning_module, strategy.engine
        assert module is not None
        for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            last = index == len(pieces) - 1
            with nullcontext() if last else engine.accumulate():
                with strategy.precision.train_step_context():
                    result = self._forward(piece, args)
                if result.loss is not None:
                    result.evidence = evidence_of(result.loss)
                    self._backward(module, result.loss, weight * scale)
                    result.loss = result.loss.detach()
            results.append(result)
        return results

    def _backward(self, module: pl.LightningModule, loss: Tensor, factor: float) -> None:
        """A piece without valid labels has a loss of 0 / 0 and counts nothing; its backward keeps ranks in step."""
        if not factor and self._strategy.data_parallel_size == 1:
            return
        loss = loss * factor if factor else loss.nan_to_num() * 0.0
        self._strategy.engine.before_backward(loss)
        module.backward(loss)
        self._strategy.engine.after_backward()

    def try_out(self, piece: Piece, args: Sequence[Any]) -> None:
        """Forward and backward of one piece for the sake of its memory; the caller forgets the gradients."""
        module = self._strategy.lightning_module
        assert module is not None
        with self._strategy.precision.train_step_context():
            result = self._forward(piece, args)
        if result.loss is not None:
            result.loss.backward()

    def compare(self, pieces: Sequence[Piece], args: Sequence[Any]) -> list[StepResult]:
        """Forward of each piece without gradients and dropout, with the same random numbers for all rows."""
        results = []
        with torch.no_grad(), SameForAllRows(), self._strategy.precision.train_step_context():
            for piece in pieces:
                with same_randomness(self._strategy.lightning_module):
                    results.append(self._forward(piece, args))
        self._strategy.engine.rest()
        return results

    def changes(self, piece: Piece, args: Sequence[Any]) -> list[str]:
        """What ``training_step`` changes besides gradients."""
        module = self._strategy.lightning_module
        assert module is not None

        over = self._strategy.assembly.tensor.over(module.training_step)

        def step(*step_args: Any) -> list[str]:
            with captured_logs(module):
                return changed_by(module, lambda: over(*step_args))

        with torch.no_grad(), self._strategy.precision.train_step_context():
            found = self._strategy.engine.run_step(step, piece.data, *args)
        self._strategy.engine.rest()
        return found

    def _forward(self, piece: Piece, args: Sequence[Any]) -> StepResult:
        module = self._strategy.lightning_module
        assert module is not None
        step = self._strategy.assembly.tensor.over(module.training_step)
        with captured_logs(module) as logged:
            output = self._strategy.engine.run_step(step, piece.data, *args)
        return StepResult(None if output is None else loss_of(output), output, logged)
