"""One training step through the stages against the same step of the whole module, before anything is trained."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.comm.agreement import Agreement
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.microbatches.split import Piece
from lightning_effi.modules.draws import SameForAllRows
from lightning_effi.modules.restore import loss_of, restored, silent
from lightning_effi.verify.compare import compare_tensors
from lightning_effi.verify.run import judge

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.context import RunContext
    from lightning_effi.pipeline_parallel.running.runner import PipelineRunner


class StageVerification:
    """Gradients of the whole module, taken while each process still holds it, and the comparison with the stages'.

    The batch runs uncut through the whole module, so that micro-batches and their weights are verified, too.
    """

    def __init__(self, context: RunContext, module: pl.LightningModule, runner: PipelineRunner) -> None:
        self._context = context
        self._module = module
        self._runner = runner
        self._expected: dict[str, Tensor] | None = None
        self._seconds = 0.0

    def expect(self, parts: Sequence[tuple[Any, float]], args: Sequence[Any]) -> None:
        """Loss and gradients of the whole module on the first batch.

        Args:
            parts: what ``training_step`` is given, with its weight: the uncut batch, or pieces where only a splitter
                of the user's knows what it can be given.
            args: arguments of ``training_step`` after the batch.
        """
        started = time.monotonic()
        module, precision = self._module, self._context.precision
        total = torch.zeros((), device=self._context.device)
        with computed_in(precision.compute, module), restored(module), silent(module), SameForAllRows():
            for data, weight in parts:
                with precision.train_step_context():
                    loss = loss_of(module.training_step(copy.deepcopy(data), *args)) * weight
                loss.backward()
                total += loss.detach()
        self._expected = {"loss": self._mean(total)}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._expected[name] = self._mean(gradient.float() if gradient.dtype.itemsize < 4 else gradient)
            parameter.grad = None
        self._seconds = time.monotonic() - started

    def compare(self, pieces: Sequence[Piece], weights: Sequence[float], args: Sequence[Any]) -> None:
        """The same through the stages.

        Raises:
            RuntimeError: on all ranks, naming the worst parameter of the stage that is furthest off.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return
        started = time.monotonic()
        context, module, engine = self._context, self._module, self._runner.engine
        with engine.whole_window(), restored(module), SameForAllRows():
            results = self._runner.train(pieces, weights, 1.0, args)
        engine.before_optimizer_step()
        losses = [result.loss for result in results if result.loss is not None]
        loss = sum((float(loss) * w for loss, w in zip(losses, weights, strict=True)), 0.0)
        actual = {"loss": self._mean(torch.tensor(loss, device=context.device))}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                actual[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
        engine.discard()
        comparison = compare_tensors(actual, {name: expected[name] for name in actual})
        everywhere = Agreement(context.groups.run.control).gather(comparison)
        worst = max(everywhere, key=lambda found: float("inf") if found.worst[1] != found.worst[1] else found.worst[1])
        judge(worst, context.precision.precision, self._seconds + time.monotonic() - started)

    def _mean(self, value: Tensor) -> Tensor:
        group = self._context.groups.data.device
        value = value.detach().clone()
        dist.all_reduce(value, group=group)
        return value / dist.get_world_size(group)
