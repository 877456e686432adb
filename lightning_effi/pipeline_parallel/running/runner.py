"""The steps of a run, carried out by a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_effi.data_parallel.optimizers import DetachedOptimizers
from lightning_effi.microbatches.logs import StepResult, log_all
from lightning_effi.microbatches.split import Piece, shapes
from lightning_effi.modules.restore import restored
from lightning_effi.pipeline_parallel.engine import PipelineEngine
from lightning_effi.pipeline_parallel.metrics import MetricSync
from lightning_effi.pipeline_parallel.planning.schedule import (
    Schedule,
    forward_schedule,
    legal_microbatches,
    make_schedule,
    place_stages,
)
from lightning_effi.pipeline_parallel.planning.timeline import Timeline
from lightning_effi.pipeline_parallel.running.evaluation import StepsTogether, name_of
from lightning_effi.pipeline_parallel.running.exchange import Exchange
from lightning_effi.pipeline_parallel.running.first_batch import FirstBatch, Planned
from lightning_effi.pipeline_parallel.running.passes import StagePass
from lightning_effi.pipeline_parallel.running.randomness import StageRandomness
from lightning_effi.pipeline_parallel.running.results import SharedResults
from lightning_effi.pipeline_parallel.running.runtime import execute
from lightning_effi.pipeline_parallel.running.stage import LiveStage
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters
from lightning_effi.pipeline_parallel.stand_ins import TensorMeta

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.context import RunContext
    from lightning_effi.pipeline_parallel.intercept import Interception
    from lightning_effi.tensor_parallel.run import TensorRun


class PipelineRunner:
    """Splits the module on its first training step, and runs steps through the stages from then on.

    The first batch goes through :meth:`observe`, :meth:`plan`, :meth:`keep_stage`, :meth:`start` and :meth:`verify`, in
    this order; before a stage is kept, the module is split by tensor parallelism, and the stage is sharded after that.

    Args:
        context: of the run.
        module: whole until :meth:`keep_stage`.
        tensor: of the ranks that hold a stage together.

    Attributes:
        stage: this rank's place in the pipeline, which is its stage where every rank has one.
    """

    def __init__(self, context: RunContext, module: pl.LightningModule, tensor: TensorRun) -> None:
        self._context = context
        self._module: Any = module
        self._at_work: PipelineEngine | None = None
        self._config = context.config.pipeline
        _refuse_own_backward(module, self._config.schedule)
        pipeline = context.groups.pipeline
        self._ranks = dist.get_process_group_ranks(pipeline.device)
        self.stage = dist.get_rank(pipeline.device)
        self.stages: StageParameters | None = None
        self._interception: Interception | None = None
        self._together: StepsTogether | None = None
        self._placement = place_stages(self._config.schedule, len(self._ranks), self._config.virtual_stages)
        self._live: dict[int, LiveStage] = {}
        self._told_count = False
        self._has_trained = False
        self._metrics = MetricSync(module, pipeline)
        self._results = SharedResults(pipeline, self._placement[-1], context.device, self._metrics)
        self._randomness = StageRandomness(module, context.precision, self._ranks[0], pipeline.control)
        self._first = FirstBatch(context, module, tensor, self._randomness)
        self._crossing: dict[Any, dict[int, tuple[TensorMeta, ...]]] = {}

    # -- splitting -----------------------------------------------------------------------------------------------------

    def observe(self, piece: Piece, args: Sequence[Any]) -> tuple[StepResult, list[str]]:
        """The whole module runs a piece of the first batch.

        Returns:
            its result, and what the step changes besides gradients.

        Raises:
            ValueError: on all ranks, where the module cannot be cut; names what is in the way.
        """
        changed = self._first.observe(piece, args)
        return self._first.result, changed

    def plan(self, microbatches: int) -> Planned:
        """Which stage runs what, by what was observed.

        Raises:
            ValueError: on all ranks, where the module cannot be cut; names what is in the way.
        """
        config = self._config
        split = None if config.split == "auto" else config.split
        timeline = Timeline.of(self._schedule(microbatches))
        return self._first.plan(timeline, self._placement, split, config.stages_per_rank)

    def keep_stage(self, planned: Planned, optimizers: DetachedOptimizers) -> StageParameters:
        """Let go of the other stages' parameters; whole steps go through the stages from here on."""
        plan, interception = planned.pipeline, self._first.interception
        held = plan.ranks[self.stage]
        context, group = self._context, self._context.groups.pipeline
        pipelines, words, timeout = context.layout.pipelines(), context.words, context.config.timeout
        self.stages = StageParameters(self._module, plan, self.stage, group, pipelines, optimizers, words, timeout)
        self._interception = interception
        interception.elsewhere = frozenset(self._first.everywhere - {*held.blocks, *held.units})
        interception.install()
        self._live = {
            stage: LiveStage(plan, stage, interception, partial(self._randomness.enter_stage, stage))
            for stage, rank in enumerate(self._placement)
            if rank == self.stage
        }
        self._together = StepsTogether(self._context, self._module, self._first, planned, self.stages, self._randomness)
        return self.stages

    def start(self, engine: PipelineEngine) -> None:
        """Run steps on ``engine`` from here on."""
        self._at_work = engine

    @property
    def engine(self) -> PipelineEngine:
        """Of the parameters and gradients of the stage, once it has started."""
        assert self._at_work is not None
        return self._at_work

    def verify(self, planned: Planned, piece: Piece, args: Sequence[Any]) -> None:
        """Prove that the stages compute what the whole module did, whatever stands in for other stages' values.

        Raises:
            RuntimeError: on all ranks, where they do not.
        """
        assert self._interception is not None
        stand_ins, expected = self._interception.stand_ins, planned.loss
        stand_ins.perturbed = True
        with restored(self._module):
            [result] = self.compare([piece], args)
        stand_ins.perturbed = False
        found = float("nan") if result.loss is None else float(result.loss)
        if not math.isfinite(expected):
            rank_zero_info("pipeline: not compared, since the whole module's own loss is not finite")
            return
        bound = 1e-4 if self._context.precision.precision in ("32-true", "64-true") else 2e-2
        if not abs(found - expected) <= bound * max(1.0, abs(expected)):
            raise RuntimeError(
                f"pipeline: the stages compute the loss {found:.6g} where the whole module computes {expected:.6g}."
                " Nothing was trained. Blocks may only hand on what they return (not what they put into a list or into"
                " their arguments). Use pipeline_parallel_size=1"
            )

    def make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        """Every rank holds the whole module again, as an ordinary one, and its optimizers' states."""
        if self.stages is not None:
            self.stages.make_whole()
            self.stages.return_to_optimizers(optimizers)
        self.forget()

    def forget(self) -> None:
        """There are no stages any more: this rank holds the whole module."""
        self.leave()
        self.stages = self._at_work = self._together = None

    def leave(self) -> None:
        """Blocks are called as they were written again, whichever of them this rank holds."""
        if self._interception is not None:
            self._interception.remove()
        if self.stages is not None:
            self.stages.hide_stand_ins()
        self._interception = None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def train(
        self, pieces: Sequence[Piece], weights: Sequence[float], scale: float, args: Sequence[Any]
    ) -> list[StepResult]:
        """Forward and backward of all pieces in the order of the schedule; every rank returns the same results."""
        schedule = self._schedule(len(pieces))
        factors = [weight * scale for weight in weights]
        data = [piece.data for piece in pieces]
        results = self.engine.run_step(self._run, schedule, self._module.training_step, data, args, factors)
        self.engine.after_backward()
        self._metrics.follow(self._placement[-1])
        self._has_trained = True
        return results

    def compare(self, pieces: Sequence[Piece], args: Sequence[Any]) -> list[StepResult]:
        """Forward of each piece without gradients and dropout, with the same random numbers for all rows."""
        if self.stages is None:
            return self._first.run(pieces, args)
        data = [piece.data for piece in pieces]
        with self._randomness.comparably():
            return self.engine.run_step(self._forward_only, self._module.training_step, data, args)

    def evaluate(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """``validation_step`` and its like: the batch goes through the stages uncut, so that all values are exact."""
        assert self._together is not None
        if not self._together.can_do_without(step, args, kwargs):
            return self.engine.run_step(self._together.run, step, batch, args, kwargs)
        [result] = self.engine.run_step(self._forward_only, step, [batch], args, kwargs)
        self._metrics.follow(self._placement[-1])
        log_all(self._module, result.logged)
        return result.output

    def _forward_only(
        self, step: Callable[..., Any], batches: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any] = {}
    ) -> list[StepResult]:
        schedule = forward_schedule(self._placement, len(batches))
        with torch.no_grad():
            return self._run(schedule, step, batches, args, None, kwargs)

    def _run(
        self,
        schedule: Schedule,
        step: Callable[..., Any],
        batches: Sequence[Any],
        args: Sequence[Any],
        factors: Sequence[float] | None,
        kwargs: Mapping[str, Any] = {},
    ) -> list[StepResult]:
        passing = StagePass(
            self._module,
            self._live,
            step,
            batches,
            args,
            kwargs,
            factors,
            randomness=self._randomness,
            precision=self._context.precision,
            metrics=self._metrics,
            engine=self.engine,
            looks_for_stand_ins=factors is not None and not self._has_trained,
        )
        keys = [self._shapes_of(step, batch) for batch in batches]
        boundaries = range(len(self._placement) - 1)
        expected = [[self._crossing.get(key, {}).get(boundary) for boundary in boundaries] for key in keys]
        pipeline = self._context.groups.pipeline
        exchange = Exchange(
            schedule, self.stage, self._ranks, pipeline.device, pipeline.control, self._context.device, expected
        )
        execute(schedule, self.stage, exchange, passing.forward, passing.backward)
        for (boundary, index), metas in sorted(exchange.crossed.items()):
            self._crossing.setdefault(keys[index], {})[boundary] = metas
        return self._results.share(passing.results, passing.unknown, passing.early)

    def _shapes_of(self, step: Callable[..., Any], batch: Any) -> Any:
        """What mostly decides about the shapes of what crosses boundaries."""
        return name_of(step), shapes(batch), self._context.precision.autocasts, self._module.training

    def fitting(self, microbatches: int) -> int:
        """The largest number of micro-batches up to this one that the schedule can have."""
        name = self._config.schedule
        count = legal_microbatches(name, len(self._ranks), microbatches)
        if count != microbatches and not self._told_count:
            self._told_count = True
            rank_zero_info(
                f"lightning_effi: pipeline={name!r} on {len(self._ranks)} ranks cannot have {microbatches}"
                f" micro-batches; batches are cut into {count}"
            )
        return count

    def _schedule(self, microbatches: int) -> Schedule:
        return make_schedule(self._config.schedule, len(self._ranks), microbatches, self._config.virtual_stages)


def _refuse_own_backward(module: Any, schedule: str) -> None:
    """``zb1p`` and ``zbv`` run the two halves of a backward at different times, and a method has only one."""
    if schedule in ("zb1p", "zbv") and is_overridden("backward", module):
        raise ValueError(
            f"pipeline={schedule!r} takes backwards apart, and {type(module).__name__} has a backward() of its own. Use"
            " pipeline='1f1b' or 'interleaved', or leave backward() out"
        )
