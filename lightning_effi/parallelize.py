"""From an intact module to one at work, and back: every step, in the order in which it is applied.

ZeRO alone asks nothing of a batch, and is applied at set-up. Tensor parallelism and pipelines leave the module whole
until its first batch shows how it is used. Either way it is :func:`parallelize` that does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.context import RunContext
from lightning_effi.data_parallel.engine import Engine, WholeEngine
from lightning_effi.data_parallel.optimizers import DetachedOptimizers, IntactOptimizers, moments
from lightning_effi.data_parallel.plan import ShardingPlan, plan_sharding, shards
from lightning_effi.data_parallel.replicated import ReplicatedEngine
from lightning_effi.data_parallel.sharded import ShardedEngine
from lightning_effi.microbatches.split import Piece
from lightning_effi.modules.deferred import DeferredValues
from lightning_effi.modules.eager import run_eagerly
from lightning_effi.modules.intact import IntactModule
from lightning_effi.modules.undo import Undo, undone_after_failure
from lightning_effi.pipeline_parallel.coupled_steps import StageStep
from lightning_effi.pipeline_parallel.engine import PipelineEngine, UnsplitEngine
from lightning_effi.pipeline_parallel.running.runner import PipelineRunner, Planned
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters
from lightning_effi.plan import Plan
from lightning_effi.tensor_parallel.planning.plan import TensorPlan
from lightning_effi.tensor_parallel.run import TensorRun
from lightning_effi.verify.run import RunProbe

Step = Callable[..., Any]


# -- what a module is in the course of a run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstStep:
    """The first call of a step hook, whose arguments show what the blocks are called with."""

    step: Step
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class FirstPiece:
    """A pipeline's first micro-batch, the arguments of ``training_step`` after it, and how many there are of it."""

    piece: Piece
    args: Sequence[Any]
    count: int


@dataclass(frozen=True)
class Work:
    """A module in a run: :class:`Waiting` for its first batch, or :class:`Parallelized`.

    Attributes:
        context: of the run.
        module: converted to the run's precision.
        engine: of its parameters and gradients.
        tensor: tensor parallelism, which does nothing where it is not asked for.
        probe: the comparison with the plain module on the first batch.
        pipeline: takes the module apart and runs steps through its stages, in a run that trains a pipeline.
        tell: called with the plan, once it is known.
    """

    context: RunContext
    module: pl.LightningModule
    engine: Engine
    tensor: TensorRun
    probe: RunProbe
    pipeline: PipelineRunner | None
    tell: Callable[[Plan], None]


@dataclass(frozen=True)
class Waiting(Work):
    """A module that has been set up, and is whole until its first batch, where it waits for one."""

    @property
    def needs_batch(self) -> bool:
        """Whether its first batch has to show how it is used."""
        return self.context.layout.tensor > 1 or self.context.layout.pipeline > 1

    def run_step(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        """Run a step hook of the module as it is."""
        return self.engine.run_step(step, *args, **kwargs)


@dataclass(frozen=True)
class Parallelized(Work):
    """A module at work: split and sharded as planned, and its optimizers with it.

    Attributes:
        plan: what is split and sharded how.
        stages: the parameters of this rank's pipeline stage.
    """

    plan: Plan
    stages: StageParameters | None

    def run_step(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        """Run a step hook of the module, through the stages if there are any."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(self.tensor.over(step), *args, **kwargs)
        return self.engine.run_step(self.tensor.over(step), *args, **kwargs)


# -- set-up ------------------------------------------------------------------------------------------------------------


def set_up(
    context: RunContext,
    module: pl.LightningModule,
    tell: Callable[[Plan], None],
    undo: Undo,
) -> Waiting:
    """Take over an intact module.

    Args:
        context: of the run.
        module: converted to the run's precision.
        tell: called with the plan, once it is known.
        undo: told how to take back what is changed around the module.
    """
    layout, tensor = context.layout, TensorRun(context)
    engine, pipeline = WholeEngine(module), None
    with undone_after_failure() as failing:
        failing.push(IntactModule(module).put_back, "modules, parameters and buffers")
        if layout.tensor > 1:
            tensor.prepare(module, undo)
        if layout.pipeline > 1:
            if layout.tensor == 1:
                run_eagerly(module, undo, "pipeline")
            lightning_compat.metrics_in_group(module, context.groups.user.device)
            undo.push(partial(lightning_compat.metrics_everywhere, module), "dist_sync_fn of the module's metrics")
            engine = UnsplitEngine(module, context)
            if module.trainer.state.fn == TrainerFn.FITTING:
                pipeline = PipelineRunner(context, module, tensor)
    return Waiting(context, module, engine, tensor, RunProbe(context), pipeline, tell)


# -- the recipe --------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def parallelize(
    waiting: Waiting, optimizers: Sequence[Optimizer], first: FirstStep | FirstPiece | None
) -> Parallelized:
    """Split and shard the module, and let the optimizers follow; all ranks must call this.

    Args:
        waiting: what has been set up.
        optimizers: as the user built them on the intact module.
        first: what shows how the module is used; ``None`` where nothing is split.

    Raises:
        ValueError: on all ranks, where the module cannot be split as asked.
        RuntimeError: on all ranks, where the parts do not compute what the whole module did.
    """
    context, module, stages = waiting.context, waiting.module, None
    with undone_after_failure() as undo:
        _keep_intact(waiting, optimizers, undo)
        tensor_plan, staged = _make_plan(waiting, first)
        if staged is None:  # a pipeline compares by itself, with what it saw of the first batch
            waiting.probe.before_sharding(module)
        with _detached(optimizers, module, context) as detached:
            if tensor_plan is not None:
                waiting.tensor.apply(module, tensor_plan)
            if staged is not None:
                stages = staged.keep(detached)
            sharding = _plan_sharding(context, module, stages)
            engine = _shard(waiting, sharding, stages)
        plan = Plan(
            context.layout,
            sharding,
            context.precision.precision,
            moments(optimizers),
            pipeline=None if staged is None else staged.planned.pipeline,
            tensor=tensor_plan,
        )
        follow(context, module, engine, optimizers)
        if stages is not None:
            context.precision.step_in_stages({id(optimizer): StageStep(optimizer, stages) for optimizer in optimizers})
        waiting.tell(plan)
        if staged is not None:
            staged.verify()
        return Parallelized(
            context, module, engine, waiting.tensor, waiting.probe, waiting.pipeline, waiting.tell, plan, stages
        )


def _keep_intact(waiting: Waiting, optimizers: Sequence[Optimizer], undo: Undo) -> None:
    """Whatever fails from here on, module and optimizers are as before, and the module waits again."""
    undo.push(IntactModule(waiting.module).put_back, "modules, parameters and buffers")
    undo.push(IntactOptimizers(optimizers).put_back, "parameters and states of optimizers")
    undo.push(waiting.tensor.forget, "layers split by tensor parallelism")
    if waiting.pipeline is not None:
        undo.push(waiting.pipeline.forget, "the stage of a pipeline")


@dataclass(frozen=True)
class _Staged:
    """A pipeline that has seen its first micro-batch."""

    pipeline: PipelineRunner
    planned: Planned
    first: FirstPiece

    def keep(self, detached: DetachedOptimizers) -> StageParameters:
        return self.pipeline.keep_stage(self.planned, detached)

    def verify(self) -> None:
        self.pipeline.verify(self.planned, self.first.piece, self.first.args)


def _make_plan(waiting: Waiting, first: FirstStep | FirstPiece | None) -> tuple[TensorPlan | None, _Staged | None]:
    """What is split how, agreed by all ranks; the module is as before."""
    match first:
        case FirstStep():
            return _plan_tensor(waiting, first), None
        case FirstPiece():
            assert waiting.pipeline is not None
            planned = waiting.pipeline.plan(first.count)
            return planned.tensor, _Staged(waiting.pipeline, planned, first)
        case None:
            return None, None


def _plan_tensor(waiting: Waiting, first: FirstStep) -> TensorPlan:
    """One run of a training step serves the plan and the comparison."""
    module, seen = waiting.module, None
    if module.trainer.training and waiting.probe.may_observe(module):
        with waiting.tensor.watching(module) as seen:
            waiting.probe.observe(module, first.step, first.args, first.kwargs)
    return waiting.tensor.plan(module, first.step, first.args, first.kwargs, seen)


@contextmanager
def _detached(
    optimizers: Sequence[Optimizer], module: pl.LightningModule, context: RunContext
) -> Iterator[DetachedOptimizers]:
    """Inside, optimizers hold names, so that parameters may be exchanged, and freed one by one.

    Where none will be, they are left alone, and may hold parameters that are not the module's.
    """
    layout = context.layout
    exchanged = shards(layout, context.config.zero_stage, context.precision.compute)
    held = optimizers if exchanged or layout.tensor > 1 or layout.pipeline > 1 else ()
    detached = DetachedOptimizers(held, module)
    yield detached
    detached.attach(module)


def _plan_sharding(context: RunContext, module: pl.LightningModule, stages: StageParameters | None) -> ShardingPlan:
    blocks = None if stages is None else stages.blocks
    return plan_sharding(module, context.layout, context.config.zero_stage, context.precision.compute, blocks=blocks)


def _shard(waiting: Waiting, plan: ShardingPlan, stages: StageParameters | None) -> Engine:
    """Put the module, or the stage of it that is left, on its device as planned, with equal values on all ranks."""
    context, module, data = waiting.context, waiting.module, waiting.context.groups.data
    sharded = None
    if plan.is_sharded:
        sharded = ShardedEngine(
            module,
            plan,
            mesh=context.mesh,
            data_parallel_group=data.device,
            control_group=data.control,
            device=context.device,
            sync_every_backward=context.config.syncs_every_backward,
            processes_per_node=context.processes_per_node,
            driven=stages is not None,
        )
    if stages is not None and waiting.pipeline is not None:
        stages.follow(module)
        context.precision.norms_over(stages)
        staged = PipelineEngine(module, stages, sharded, context, partial(_make_whole, waiting, stages))
        waiting.pipeline.start(staged)
        return staged
    if sharded is not None:
        return sharded
    if context.layout.data_parallel_size > 1:
        every = context.config.syncs_every_backward
        return ReplicatedEngine(
            module,
            group=data.device,
            control_group=data.control,
            device=context.device,
            sync_every_backward=every,
        )
    DeferredValues(module).fill_through(module)
    module.to(context.device)
    return WholeEngine(module)


def follow(context: RunContext, module: pl.LightningModule, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Let the optimizers of a run that trains, and the engine, know each other."""
    if module.trainer.state.fn == TrainerFn.FITTING:
        lightning_compat.optimizers_to_device(optimizers, context.device)
        for optimizer in optimizers:
            engine.watch(optimizer)
        context.precision.step_on_shards(optimizers)


# -- taking apart ------------------------------------------------------------------------------------------------------


def take_apart(work: Waiting | Parallelized, optimizers: Sequence[Optimizer]) -> bool:
    """The module is an ordinary one again, wherever the memory allows it; all ranks must call this.

    Returns:
        whether it is.
    """
    if isinstance(work, Parallelized) and not work.engine.is_sharded and work.stages is None:
        work.tensor.undo()  # while the parts are on their devices
    if not work.engine.release(optimizers):
        rank_zero_info(
            "lightning_effi: the module stays sharded, since it does not fit into the memory of one process. Use"
            " trainer.save_checkpoint(), or go on with this Trainer"
        )
        return False
    work.tensor.undo()
    work.context.precision.release(work.module)
    return True


def abandon(work: Waiting | Parallelized) -> None:
    """After a failure that other ranks have not met: take off hooks and shadowed methods, which asks nobody."""
    work.engine.leave()
    if work.pipeline is not None:
        work.pipeline.leave()
    work.context.precision.release(work.module)


def _make_whole(waiting: Waiting, stages: StageParameters, optimizers: Sequence[Optimizer]) -> None:
    """Undo what :func:`parallelize` did to the module of a pipeline before it was sharded."""
    assert waiting.pipeline is not None
    waiting.tensor.undo()
    stages.follow(waiting.module)
    waiting.pipeline.make_whole(optimizers)
