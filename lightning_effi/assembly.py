"""From an intact module to one at work: split, sharded, with optimizers that follow; and back again."""

from __future__ import annotations

from collections.abc import Callable
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
from lightning_effi.microbatches.step import MicrobatchedStep, Runner, refuse_uncuttable
from lightning_effi.pipeline_parallel.engine import PipelineEngine
from lightning_effi.pipeline_parallel.planning.plan import PipelinePlan, Stage
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
        self.microbatched: MicrobatchedStep | None = None
        self.tensor = TensorRun(strategy)
        self.probe = RunProbe(strategy)

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
    def plan(self) -> Plan | None:
        """``None`` before set-up and, with tensor parallelism, before the first step."""
        return None if self.tensor.is_pending else self._plan

    @property
    def pipeline(self) -> PipelineRunner:
        """Runs steps through the stages; there once a pipeline has been set up for training."""
        assert isinstance(self._engine, PipelineEngine)
        assert self._engine.runner is not None
        return self._engine.runner

    @property
    def stages(self) -> StageParameters | None:
        """The parameters of this rank's pipeline stage; ``None`` without a pipeline, and before its first step."""
        return self._engine.stages if isinstance(self._engine, PipelineEngine) else None

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
        self.microbatched = self._cut(module) if fitting else None

    def before_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Whatever waits for the arguments of a step, which runs within the precision's context."""
        self.tensor.begin_step(args)
        if self.tensor.is_pending and self._strategy.layout.pipeline == 1:
            self._split(step, args, kwargs)

    def _start(self, trainer: pl.Trainer, module: pl.LightningModule, fitting: bool) -> None:
        strategy, layout = self._strategy, self._strategy.layout
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
            self.tensor.prepare(module)
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
            mesh=strategy.device_mesh if strategy.needs_process_group else None,
            data_parallel_group=strategy.data_parallel_group,
            control_group=strategy.control_group,
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

    def _cut(self, module: pl.LightningModule) -> MicrobatchedStep | None:
        """``None``: each batch is one piece."""
        strategy = self._strategy
        stages, count = strategy.layout.pipeline, strategy.config.microbatches.count
        # a mean over labels spans windows and ranks, and running out of memory may call for more pieces
        wanted = strategy.config.microbatches.weight == "valid_labels" or strategy.config.microbatches.oom_retry
        if stages == 1 and count in ("auto", 1) and not wanted:
            return None
        refuse_uncuttable(module, strategy.config)
        refuse_retry(strategy.config, strategy.data_parallel_size)
        if isinstance(self._engine, PipelineEngine):
            self._engine.runner = PipelineRunner(strategy, strategy.pipeline_group)
            runner: Runner = self._engine.runner
        else:
            runner = SequentialRunner(strategy)
        if count == "auto":
            count = 3 * stages if stages > 1 else 1
        agreement = Agreement(strategy.run_control_group) if strategy.has_several_processes else None
        verification: StageVerification | None = None
        verify = strategy.layout.tensor > 1 if strategy.config.verify == "auto" else strategy.config.verify
        if verify and isinstance(runner, PipelineRunner):
            verification = StageVerification(strategy, runner)
        return MicrobatchedStep(strategy, runner, count, agreement, verification)

    def _start_pipeline(self, module: pl.LightningModule) -> None:
        """The module stays whole until the first training step."""
        strategy = self._strategy
        if strategy.config.zero_stage and strategy.data_parallel_size > 1:
            refuse_unshardable(strategy.optimizers, f"zero_stage={strategy.config.zero_stage}")
        self._engine = PipelineEngine(
            module,
            group=strategy.pipeline_group,
            replicas=strategy.data_parallel_group,
            pipeline_control_group=strategy.pipeline_control_group,
            control_group=strategy.run_control_group,
            device=strategy.root_device,
            processes_per_node=strategy.num_processes,
            sync_every_microbatch=strategy.config.gradient_sync == "every",
            computing=partial(computed_in, strategy.precision.compute),
            undo_tensor=self.tensor.undo,
        )

    def split_tensors(self, module: pl.LightningModule, plan: TensorPlan) -> None:
        """Apply tensor parallelism to a module that a pipeline has not cut yet; its optimizers follow."""
        optimizers = DetachedOptimizers(self._strategy.optimizers, module)
        self.tensor.apply(module, plan)
        optimizers.attach(module)

    def on_split(self, plan: PipelinePlan, stage: Stage, tensor: TensorPlan | None) -> None:
        """The pipeline's first training step has split the module; ``stage`` of it is left here, and sharded now."""
        strategy, engine, stages = self._strategy, self._engine, self.stages
        module = strategy.lightning_module
        assert isinstance(engine, PipelineEngine)
        assert module is not None
        assert stages is not None
        config, compute = strategy.config, strategy.precision.compute
        sharding = plan_sharding(module, strategy.layout, config.zero_stage, compute, blocks=stage.blocks)
        precision, states = strategy.precision.precision, moments(strategy.optimizers)
        self._plan = Plan(strategy.layout, sharding, precision, states, pipeline=plan, tensor=tensor)
        if sharding.is_sharded:
            optimizers = DetachedOptimizers(strategy.optimizers, module)
            sharded = ShardedEngine(
                module,
                sharding,
                mesh=strategy.device_mesh,
                data_parallel_group=strategy.data_parallel_group,
                control_group=strategy.control_group,
                device=strategy.root_device,
                sync_every_backward=config.syncs_every_backward,
                processes_per_node=strategy.num_processes,
                driven=True,
            )
            optimizers.attach(module)
            engine.shard(sharded)
            self._prepare_optimizers()
        strategy.precision.stages = stages
        self.show_plan()

    def show_plan(self) -> None:
        """Once, unless it has changed (another module, another optimizer)."""
        if self.plan is not None and (text := str(self.plan)) != self._shown_plan:
            self._shown_plan = text
            rank_zero_info(text)

    # -- taking apart ------------------------------------------------------------------------------------------------

    def release(self) -> None:
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
