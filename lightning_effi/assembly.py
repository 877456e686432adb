"""From an intact module to one at work: split, sharded, with optimizers that follow; and back again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_effi.comm.agreement import Agreement
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.data_parallel.build import build_engine
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.data_parallel.engine import Engine
from lightning_effi.data_parallel.optimizers import DetachedOptimizers, moments
from lightning_effi.data_parallel.plan import plan_sharding
from lightning_effi.data_parallel.refuse import refuse_averaging_of_shards, refuse_unshardable
from lightning_effi.data_parallel.sharded import ShardedEngine
from lightning_effi.microbatches.retry import refuse_retry
from lightning_effi.microbatches.sequential import SequentialRunner
from lightning_effi.microbatches.split import Piece
from lightning_effi.microbatches.step import MicrobatchedStep, refuse_uncuttable
from lightning_effi.pipeline_parallel.engine import PipelineEngine
from lightning_effi.pipeline_parallel.running.runner import PipelineRunner
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters
from lightning_effi.pipeline_parallel.verify import StageVerification
from lightning_effi.plan import Plan
from lightning_effi.tensor_parallel.planning.plan import TensorPlan
from lightning_effi.tensor_parallel.run import TensorRun
from lightning_effi.verify.run import RunProbe

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.strategy import EffiStrategy


class Assembly:
    """What a strategy has built around the module: the engine, the plan, the cut of each batch.

    The order is: precision converts the module, ``configure_optimizers`` sees it intact, then it is split by tensor
    parallelism (in the first step, whose batch shows what the blocks are called with) and sharded, and the optimizers
    are given the parts. A pipeline splits it in its first training step as well.
    """

    def __init__(self, strategy: EffiStrategy) -> None:
        self._strategy = strategy
        self._plan: Plan | None = None
        self._shown_plan = ""
        self._engine: Engine | None = None
        self._tensor: TensorRun | None = None
        self._probe: RunProbe | None = None
        self.microbatched: MicrobatchedStep | None = None

    # -- what has been built -----------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the module has been set up."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """Data parallelism, or a pipeline, at work; there once the module has been set up."""
        assert self._engine is not None
        return self._engine

    @property
    def tensor(self) -> TensorRun:
        """Tensor parallelism at work; there once the module has been set up."""
        assert self._tensor is not None
        return self._tensor

    @property
    def probe(self) -> RunProbe:
        """The comparison with the plain module; there once the module has been set up."""
        assert self._probe is not None
        return self._probe

    @property
    def plan(self) -> Plan | None:
        """``None`` before set-up and, with tensor parallelism, before the first step."""
        return None if self._tensor is None or self._tensor.is_pending else self._plan

    @property
    def stages(self) -> StageParameters | None:
        """The parameters of this rank's pipeline stage; ``None`` without a pipeline, and before its first step."""
        return self._engine.stages if isinstance(self._engine, PipelineEngine) else None

    @property
    def modules_of_stage(self) -> tuple[str, ...] | None:
        """Blocks and units that a pipeline runs on this rank; ``None`` before its first step."""
        if self.stages is None or self._plan is None or self._plan.pipeline is None:
            return None
        stage = self._plan.pipeline.ranks[self.stages.stage]
        return (*stage.blocks, *stage.units)

    # -- building ----------------------------------------------------------------------------------------------------

    def build(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Set up ``module`` for the entry point that ``trainer`` is in; again for a further one."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._engine is None or self._engine.module is not module:
            self._start(trainer, module, fitting)
        elif fitting:
            if self.stages is not None:
                raise RuntimeError(
                    f"{type(module).__name__} is still split into pipeline stages by an earlier fit, since the whole"
                    " module does not fit into the memory of one process. Build it anew and load a checkpoint"
                )
            self._engine.rest()
            self._strategy.setup_optimizers(trainer)
        if fitting:
            self._prepare_optimizers()
        self.microbatched = None
        if fitting and self._wants_microbatches:
            refuse_uncuttable(module, self._strategy.config)
            refuse_retry(self._strategy.config, self._strategy.data_parallel_size)
            if self._strategy.layout.pipeline > 1 or not self.tensor.is_pending:
                self.microbatched = self._cut(module)

    def before_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Whatever waits for the arguments of a step, which runs within the precision's context."""
        self.tensor.begin_step(args)
        if self.tensor.is_pending and self._strategy.layout.pipeline == 1:
            self._split(step, args, kwargs)

    def _start(self, trainer: pl.Trainer, module: pl.LightningModule, fitting: bool) -> None:
        strategy, layout = self._strategy, self._strategy.layout
        self._tensor, self._probe = TensorRun(strategy.context), RunProbe(strategy.context)
        if strategy.layer_sync is not None:
            module = strategy.layer_sync.apply(module)  # type: ignore[assignment]
        strategy.model = strategy.precision.convert_module(module)
        if fitting:
            strategy.setup_optimizers(trainer)
        if layout.pipeline > 1:
            refuse_averaging_of_shards(trainer, f"pipeline_parallel_size={layout.pipeline}")
        if layout.tensor > 1:
            refuse_unshardable(strategy.optimizers, f"tensor_parallel_size={layout.tensor}")
            refuse_averaging_of_shards(trainer, f"tensor_parallel_size={layout.tensor}")
            self.tensor.prepare(module, strategy.undo)
        if layout.pipeline > 1:
            self._start_pipeline(module)
            return
        if layout.tensor > 1:
            self._engine = Engine(module)  # until the first step
            return
        self.probe.before_sharding(module)
        self._shard(module, None)

    def _split(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Plan and apply tensor parallelism, then shard what it leaves."""
        module = self._strategy.lightning_module
        assert module is not None
        with torch.inference_mode(False):
            plan = self.tensor.plan(module, step, args, kwargs)
            self.probe.before_sharding(module)
            optimizers = DetachedOptimizers(self._strategy.optimizers, module)
            self.tensor.apply(module, plan)
            self._shard(module, plan, optimizers)
            if module.trainer.state.fn == TrainerFn.FITTING:
                self._prepare_optimizers()
                if self._wants_microbatches:
                    self.microbatched = self._cut(module)
        self.show_plan()

    def _shard(
        self, module: pl.LightningModule, tensor: TensorPlan | None, optimizers: DetachedOptimizers | None = None
    ) -> None:
        """Exchange the parameters for shards, in the module and in its optimizers (given where detached already)."""
        strategy = self._strategy
        states = moments(strategy.optimizers)
        plan = plan_sharding(module, strategy.layout, strategy.config.zero_stage, strategy.precision.compute)
        if plan.is_sharded:
            refuse_unshardable(strategy.optimizers, f"zero_stage={strategy.config.zero_stage}")
            refuse_averaging_of_shards(module.trainer, f"zero_stage={strategy.config.zero_stage}")
        self._plan = Plan(strategy.layout, plan, strategy.precision.precision, states, tensor=tensor)
        if optimizers is None and plan.is_sharded:
            optimizers = DetachedOptimizers(strategy.optimizers, module)
        self._engine = build_engine(
            module,
            plan,
            mesh=strategy.context.mesh,
            data_parallel_group=strategy.context.groups.data.device,
            control_group=strategy.context.groups.data.control,
            device=strategy.root_device,
            sync_every_backward=strategy.config.syncs_every_backward,
            processes_per_node=strategy.num_processes,
        )
        if optimizers is not None:
            optimizers.attach(module)

    def _prepare_optimizers(self) -> None:
        strategy = self._strategy
        lightning_compat.optimizers_to_device(strategy.optimizers, strategy.root_device)
        for optimizer in strategy.optimizers:
            self.engine.watch(optimizer)
        strategy.precision.step_on_shards(strategy.optimizers)

    @property
    def _wants_microbatches(self) -> bool:
        """Otherwise each batch is one piece."""
        stages, config = self._strategy.layout.pipeline, self._strategy.config.microbatches
        # a mean over labels spans windows and ranks, and running out of memory may call for more pieces
        return stages > 1 or config.count not in ("auto", 1) or config.weight == "valid_labels" or config.oom_retry

    def _cut(self, module: pl.LightningModule) -> MicrobatchedStep:
        strategy, context, engine = self._strategy, self._strategy.context, self.engine
        stages, count = context.layout.pipeline, context.config.microbatches.count
        if count == "auto":
            count = 3 * stages if stages > 1 else 1
        agreement = Agreement(context.groups.run.control) if context.has_several_processes else None
        if not isinstance(engine, PipelineEngine):
            alone = context.layout.data_parallel_size == 1
            sequential = SequentialRunner(module, engine, self.tensor.over, context.precision, alone=alone)
            return MicrobatchedStep(context, module, engine, strategy.window, sequential, count, agreement)
        runner = engine.runner = PipelineRunner(context, module, engine, self.tensor)
        verify = context.layout.tensor > 1 if context.config.verify == "auto" else context.config.verify
        verification = StageVerification(context, module, engine, runner) if verify else None
        prepare = partial(self._split_into_stages, runner)
        return MicrobatchedStep(
            context, module, engine, strategy.window, runner, count, agreement, prepare, verification
        )

    def _start_pipeline(self, module: pl.LightningModule) -> None:
        """The module stays whole until the first training step."""
        strategy = self._strategy
        if strategy.config.zero_stage and strategy.data_parallel_size > 1:
            refuse_unshardable(strategy.optimizers, f"zero_stage={strategy.config.zero_stage}")
        lightning_compat.metrics_in_group(module, strategy.data_parallel_group)
        strategy.undo.push(partial(lightning_compat.metrics_everywhere, module))
        self._engine = PipelineEngine(
            module,
            group=strategy.context.groups.pipeline.device,
            replicas=strategy.context.groups.data.device,
            pipeline_control_group=strategy.context.groups.pipeline.control,
            control_group=strategy.context.groups.run.control,
            device=strategy.root_device,
            processes_per_node=strategy.num_processes,
            sync_every_microbatch=strategy.config.gradient_sync == "every",
            computing=partial(computed_in, strategy.precision.compute),
            undo_tensor=self.tensor.undo,
        )

    def _split_into_stages(self, runner: PipelineRunner, piece: Piece, args: Sequence[Any], microbatches: int) -> None:
        """In a pipeline's first training step: plan, keep one stage of the module, and shard that."""
        context, engine, optimizers = self._strategy.context, self.engine, self._strategy.optimizers
        module = self._strategy.lightning_module
        assert isinstance(engine, PipelineEngine)
        assert module is not None
        planned = runner.plan(piece, args, microbatches)
        if planned.tensor is not None:
            detached = DetachedOptimizers(optimizers, module)
            self.tensor.apply(module, planned.tensor)
            detached.attach(module)
        stages = runner.keep_stage(planned, optimizers)
        config, precision = context.config, context.precision
        blocks = planned.pipeline.ranks[runner.stage].blocks
        sharding = plan_sharding(module, context.layout, config.zero_stage, precision.compute, blocks=blocks)
        self._plan = Plan(
            context.layout,
            sharding,
            precision.precision,
            moments(optimizers),
            pipeline=planned.pipeline,
            tensor=planned.tensor,
        )
        if sharding.is_sharded:
            detached = DetachedOptimizers(optimizers, module)
            sharded = ShardedEngine(
                module,
                sharding,
                mesh=context.mesh,
                data_parallel_group=context.groups.data.device,
                control_group=context.groups.data.control,
                device=context.device,
                sync_every_backward=config.syncs_every_backward,
                processes_per_node=context.processes_per_node,
                driven=True,
            )
            detached.attach(module)
            engine.shard(sharded)
            self._prepare_optimizers()
        precision.stages = stages
        self.show_plan()
        runner.verify(planned, piece, args)

    def show_plan(self) -> None:
        """Once, unless it has changed (another module, another optimizer)."""
        if self.plan is not None and (text := str(self.plan)) != self._shown_plan:
            self._shown_plan = text
            rank_zero_info(text)

    # -- taking apart ------------------------------------------------------------------------------------------------

    def end(self, all_ranks: bool) -> None:
        """A run is over. With ``all_ranks`` here, the module is made an ordinary one; else only hooks are taken off."""
        if self._engine is None:
            return
        if all_ranks:
            self._release()
            return
        self._engine.leave()
        self._engine = None
        if self._strategy.lightning_module is not None:
            self._strategy.precision.release(self._strategy.lightning_module)

    def _release(self) -> None:
        """The module is an ordinary one again, wherever the memory allows it; all ranks must call this."""
        strategy = self._strategy
        assert strategy.lightning_module is not None
        if self._plan is not None and not self._plan.sharding.is_sharded and strategy.layout.pipeline == 1:
            self.tensor.undo()
        if self.engine.release(strategy.optimizers):
            self.tensor.undo()
            self._engine = None
            strategy.precision.release(strategy.lightning_module)
            if strategy.layer_sync is not None:
                strategy.layer_sync.revert(strategy.lightning_module)
        else:
            rank_zero_info(
                "lightning_effi: the module stays sharded, since it does not fit into the memory of one process. Use"
                " trainer.save_checkpoint(), or go on with this Trainer"
            )
