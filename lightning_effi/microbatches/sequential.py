"""Micro-batches one after the other: forward and backward of each, then the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_effi.comm.agreement import Agreement
from lightning_effi.microbatches.evidence import evidence_of
from lightning_effi.microbatches.logs import StepResult, captured_logs
from lightning_effi.microbatches.split import Piece
from lightning_effi.modules.draws import SameForAllRows
from lightning_effi.modules.randomness import Randomness
from lightning_effi.modules.restore import loss_of, same_randomness
from lightning_effi.modules.snapshot import Snapshot
from lightning_effi.modules.state_changes import changed_by

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.data_parallel.engine import Engine
    from lightning_effi.precision import EffiPrecision


@dataclass(frozen=True)
class _Begun:
    """The forward of a piece whose backward is to come, and what the module held before."""

    piece: Piece
    result: StepResult
    held: Snapshot


class SequentialRunner:
    """Runs the pieces of a batch on this rank's engine.

    Args:
        module: whose ``training_step`` is run.
        engine: of its parameters and gradients.
        over: what a step hook runs as on the module, whose layers may be split.
        precision: what it computes with.
        alone: whether no other rank runs the same step with other data.
        agreement: among all ranks that run a step together, or ``None``.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        engine: Engine,
        over: Callable[[Callable[..., Any]], Callable[..., Any]],
        precision: EffiPrecision,
        *,
        alone: bool,
        agreement: Agreement | None = None,
    ) -> None:
        self._module = module
        self._engine = engine
        self._over = over
        self._precision = precision
        self._alone = alone
        self._agreement = agreement
        self._draws = False  # whether compared steps would have drawn numbers of their own in training
        self._begun: _Begun | None = None

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
        results = []
        for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            last = index == len(pieces) - 1
            with nullcontext() if last else self._engine.accumulate():
                result = self._begun_with(piece)
                if result is None:
                    with self._precision.train_step_context():
                        result = self._forward(piece, args)
                if result.loss is not None:
                    result.evidence = evidence_of(result.loss)
                    self._backward(result.loss, weight * scale)
                    result.loss = result.loss.detach()
            results.append(result)
        return results

    def _backward(self, loss: Tensor, factor: float) -> None:
        """A piece without valid labels has a loss of 0 / 0 and counts nothing; its backward keeps ranks in step."""
        if not factor and self._alone:
            return
        loss = loss * factor if factor else loss.nan_to_num() * 0.0
        self._engine.before_backward(loss)
        self._module.backward(loss)
        self._engine.after_backward()

    def try_out(self, piece: Piece, args: Sequence[Any]) -> None:
        """Forward and backward of one piece for the sake of its memory; the caller forgets the gradients."""
        with self._precision.train_step_context():
            result = self._forward(piece, args)
        if result.loss is not None:
            result.loss.backward()

    def begin(self, piece: Piece, args: Sequence[Any]) -> StepResult | None:
        """The forward with which :meth:`train` begins, run early so that its loss can take part in a comparison.

        ``None``, and nothing has happened, where it draws random numbers: the compared steps have drawn others.
        """
        if self._any(self._draws):
            return None
        randomness = Randomness(self._module)
        drawn, held = randomness.get(), Snapshot(self._module)
        with self._engine.accumulate(), self._precision.train_step_context():
            result = self._forward(piece, args)
        self._begun = _Begun(piece, result, held)
        if self._any(randomness.has_moved(drawn)):
            self.forget()
            randomness.set(drawn)
            return None
        return StepResult(None if result.loss is None else result.loss.detach(), None, result.logged)

    def _begun_with(self, piece: Piece) -> StepResult | None:
        if self._begun is None or self._begun.piece is not piece:
            return None
        result, self._begun = self._begun.result, None
        return result

    def forget(self) -> None:
        """Drop what was begun, as if it had not run."""
        if self._begun is not None:
            self._begun.held.put_back()
            self._begun = None
            self._engine.rest()

    def compare(self, pieces: Sequence[Piece], args: Sequence[Any]) -> list[StepResult]:
        """Forward of each piece without gradients and dropout, with the same random numbers for all rows."""
        results = []
        with torch.no_grad(), SameForAllRows() as draws, self._precision.train_step_context():
            for piece in pieces:
                with same_randomness(self._module):
                    results.append(self._forward(piece, args))
        self._draws |= draws.changes
        self._engine.rest()
        return results

    def observe(self, piece: Piece, args: Sequence[Any]) -> tuple[StepResult, list[str]]:
        """The result of a piece as :meth:`compare` gives it, and what ``training_step`` changes besides gradients."""
        module, over = self._module, self._over(self._module.training_step)
        found: list[StepResult] = []

        def run(*step_args: Any) -> None:
            with captured_logs(module) as logged:
                output = over(*step_args)
            found.append(StepResult(None if output is None else loss_of(output), output, logged))

        def step(*step_args: Any) -> list[str]:
            return changed_by(module, lambda: run(*step_args), self._any)

        with torch.no_grad(), SameForAllRows() as draws, self._precision.train_step_context():
            changed = self._engine.run_step(step, piece.data, *args)
        self._draws |= draws.changes
        self._engine.rest()
        return found[0], changed

    def _any(self, flag: bool) -> bool:
        return flag if self._agreement is None else self._agreement.any([flag])[0]

    def _forward(self, piece: Piece, args: Sequence[Any]) -> StepResult:
        with captured_logs(self._module) as logged:
            output = self._engine.run_step(self._over(self._module.training_step), piece.data, *args)
        return StepResult(None if output is None else loss_of(output), output, logged)
