"""One pass of a step's micro-batches through the stages of a rank: what is done for each action of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_effi.microbatches.evidence import evidence_of
from lightning_effi.microbatches.logs import Logged, StepResult, captured_logs
from lightning_effi.modules.restore import loss_of
from lightning_effi.pipeline_parallel.engine import PipelineEngine
from lightning_effi.pipeline_parallel.metrics import MetricSync
from lightning_effi.pipeline_parallel.planning.schedule import Action
from lightning_effi.pipeline_parallel.running.backward import backward_of_inputs, differentiable
from lightning_effi.pipeline_parallel.running.randomness import StageRandomness
from lightning_effi.pipeline_parallel.running.results import Call, detached
from lightning_effi.pipeline_parallel.running.stage import LiveStage
from lightning_effi.pipeline_parallel.stand_ins import stands_behind
from lightning_effi.precision import EffiPrecision


class StagePass:
    """Forward and backward of single micro-batches.

    Args:
        module: the user's.
        live: this rank's stages.
        step: the step hook that is run.
        batches: the micro-batches.
        args: of the step, after the batch.
        kwargs: of the step.
        factors: of the losses; ``None`` where there is no backward.
        randomness: of the pipeline.
        precision: of the run.
        metrics: of the module.
        engine: told of each backward.
        looks_for_stand_ins: whether autograd's graphs are searched for them.

    Attributes:
        results: of the micro-batches, once the last stage has run.
        unknown: calls of ``self.log`` whose values the last stage does not know.
        early: values that other stages logged, as far as they know them.
    """

    def __init__(
        self,
        module: Any,
        live: Mapping[int, LiveStage],
        step: Callable[..., Any],
        batches: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        factors: Sequence[float] | None,
        *,
        randomness: StageRandomness,
        precision: EffiPrecision,
        metrics: MetricSync,
        engine: PipelineEngine,
        looks_for_stand_ins: bool,
    ) -> None:
        self._module, self._live, self._step = module, live, step
        self._batches, self._args, self._kwargs, self._factors = batches, args, kwargs, factors
        self._randomness, self._precision, self._metrics, self._engine = randomness, precision, metrics, engine
        self._looks_for_stand_ins = looks_for_stand_ins
        self.results = [StepResult(None, None) for _ in batches]
        self.unknown: list[Call] = []
        self.early: dict[Call, Any] = {}

    def forward(self, action: Action, received: list[Tensor]) -> list[Tensor]:
        """What the next stage receives."""
        live, index = self._live[action.stage], action.microbatch
        counted = nullcontext() if live.is_last or len(self._live) == 1 else self._metrics.unchanged()
        seeded, context = self._randomness.of_microbatch(index), self._precision.forward_context()
        with seeded, context, counted, captured_logs(self._module) as logged:
            sent, output = live.run(received, lambda: self._step(self._batches[index], *self._args, **self._kwargs))
        self._note_logs(live, index, logged)
        if live.is_last:
            self.results[index] = self._result(output, logged)
        if self._looks_for_stand_ins:
            loss = self.results[index].loss if live.is_last else None
            _refuse_stand_ins(sent if loss is None else [loss])
        return sent

    def backward(
        self, action: Action, outputs: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor]
    ) -> Callable[[], None] | None:
        """From what was sent, or from the loss; for an action ``I``, returns what is left for ``W``."""
        if gradients is None:
            outputs = self._weighted_loss(action.microbatch)
        else:
            outputs, gradients = differentiable(outputs, gradients)
        if action.kind == "I":
            return self._then_tell(backward_of_inputs(outputs, gradients, inputs))
        if gradients is not None:
            torch.autograd.backward(outputs, gradients)
        else:
            for loss in outputs:
                self._module.backward(loss)
        self._engine.after_microbatch()
        return None

    def _result(self, output: Any, logged: list[Logged]) -> StepResult:
        trains = self._factors is not None
        loss = loss_of(output) if output is not None and (trains or _has_loss(output)) else None
        return StepResult(loss, output, logged, None if loss is None else evidence_of(loss))

    def _note_logs(self, live: LiveStage, index: int, logged: Sequence[Logged]) -> None:
        for number, call in enumerate(logged):
            knows = live.knows(call.value)
            if live.is_last and not knows:
                self.unknown.append((index, number))
            elif not live.is_last and knows:
                self.early.setdefault((index, number), call.value)

    def _weighted_loss(self, index: int) -> list[Tensor]:
        assert self._factors is not None
        result, factor = self.results[index], self._factors[index]
        self.results[index] = detached(result)
        return [result.loss * factor] if result.loss is not None and factor else []

    def _then_tell(self, finish: Callable[[], None]) -> Callable[[], None]:
        def finish_and_tell() -> None:
            finish()
            self._engine.after_microbatch()

        return finish_and_tell


def _refuse_stand_ins(tensors: Sequence[Tensor]) -> None:
    name = stands_behind(tensors)
    if name is not None:
        raise RuntimeError(
            f"pipeline: a gradient would flow to '{name}' past the stage's own blocks, whose stage it cannot reach."
            " Nothing was trained. Hand its value on as an argument of the blocks, or use pipeline_parallel_size=1"
        )


def _has_loss(output: Any) -> bool:
    return isinstance(output, Tensor) or (isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor))
