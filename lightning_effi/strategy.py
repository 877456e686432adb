"""The life of a run: each of Lightning's strategy hooks in call order, delegating to the room that knows how."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_effi.at_work import ModuleAtWork
from lightning_effi.checkpoint.run import Held, RunCheckpoint
from lightning_effi.comm.ranks import for_processes
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.config import (
    ActivationCheckpointing,
    Attention,
    CheckpointFormat,
    CheckpointingPolicy,
    Checkpoints,
    EffiConfig,
    GradientSync,
    Microbatches,
    OptimizerStates,
    Pipeline,
    Schedule,
    StartMethod,
    StateDtype,
    TensorParallel,
    ZeroStage,
    as_timedelta,
    expand,
)
from lightning_effi.data_parallel.engine import Engine
from lightning_effi.gradients.readable import ReadableShards
from lightning_effi.gradients.window import AccumulationWindow
from lightning_effi.launch import end_other_processes, make_launcher
from lightning_effi.loop.batches import agree_on_length
from lightning_effi.loop.failure import failed_together
from lightning_effi.loop.signals import DeferredSignals
from lightning_effi.loop.skipped import SkippedSteps
from lightning_effi.mesh import MeshStrategy
from lightning_effi.modules.deferred import parameters_on_meta
from lightning_effi.plan import Plan
from lightning_effi.precision import EffiPrecision
from lightning_effi.sharded_tensors.installation import install

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")

_NAMED_LAYOUTS = ((2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2))
"""Tensor- and pipeline-parallel sizes for which there is a name, for packages that take strategies by name only."""


class EffiStrategy(MeshStrategy):
    """Trains an unmodified ``LightningModule`` with ZeRO sharding, tensor and pipeline parallelism.

    All arguments are keyword-only after the first and come from Python, YAML and the command line alike. A short
    value stands for the dataclass of the same concern (``checkpoints="sharded"`` is
    ``Checkpoints(format="sharded")``). Settings that this version does not carry out are refused at construction.

    Args:
        zero_stage: what is sharded over the data-parallel ranks: 0 nothing, 1 optimizer states, 2 gradients too,
            3 parameters too (ZeRO, arXiv:1910.02054).
        data_parallel_size: processes / (tensor x pipeline); a number is checked against that.
        replicate_size: hybrid sharding, the number of copies of the sharded group.
        tensor_parallel_size: ranks in one tensor-parallel group.
        pipeline_parallel_size: ranks in one pipeline.
        microbatches: pieces into which each batch is cut inside one ``training_step``.
        pipeline: pipeline schedule.
        tensor: details of tensor parallelism.
        activation_checkpointing: which activations are recomputed in backward.
        attention: attention kernel.
        optimizer_states: storage of the optimizer's moments.
        parameter_offload: keep sharded parameters in CPU memory.
        exact_accumulation: average the last, short accumulation window of an epoch over the batches really in it;
            stock Lightning divides by ``accumulate_grad_batches`` all the same, and so does the default.
        gradient_sync: reduce gradients in every backward of a window (least memory) or only in the last (least
            communication); ``auto`` is ``last`` for stages 0 and 1, ``every`` for 2 and 3.
        compile: compile each block.
        verify: compare loss and gradients with the plain module on the first batch, before the first step; ``auto``
            does so where the package had to infer how to split the module, which data parallelism never does.
        checkpoints: ``full`` (one file that plain Lightning loads) or ``sharded`` (a directory, each rank its part).
        process_group_backend: ``None`` is NCCL on CUDA and gloo on CPU.
        timeout: how long a collective may wait for the other ranks; seconds or a timedelta.
        start_method: how Lightning starts the processes of this node; ``auto`` is ``popen``, in notebooks ``fork``.
        accelerator: as in Lightning's own strategies, like all that follow.
        parallel_devices: devices of this node.
        cluster_environment: who is who among the processes.
        checkpoint_io: how files are written and read.
        precision_plugin: an :class:`~lightning_effi.EffiPrecision`.

    Raises:
        ValueError: for a value that is not allowed, naming the setting and the allowed ones.
    """

    strategy_name = "effi"

    def __init__(
        self,
        zero_stage: ZeroStage = 2,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        microbatches: int | Literal["auto"] | Microbatches = "auto",
        pipeline: Schedule | Pipeline = "1f1b",
        tensor: TensorParallel | None = None,
        activation_checkpointing: CheckpointingPolicy | ActivationCheckpointing | None = None,
        attention: Attention = "auto",
        optimizer_states: StateDtype | OptimizerStates = "float32",
        parameter_offload: bool = False,
        exact_accumulation: bool = False,
        gradient_sync: GradientSync = "auto",
        compile: bool | dict[str, Any] = False,
        verify: bool | Literal["auto"] = "auto",
        checkpoints: CheckpointFormat | Checkpoints = "full",
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
        start_method: StartMethod = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.config = EffiConfig(
            zero_stage=zero_stage,
            data_parallel_size=data_parallel_size,
            replicate_size=replicate_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            microbatches=expand("microbatches", microbatches, Microbatches, "count"),
            pipeline=expand("pipeline", pipeline, Pipeline, "schedule"),
            tensor=expand("tensor", tensor, TensorParallel, "plan"),
            activation_checkpointing=expand(
                "activation_checkpointing", activation_checkpointing, ActivationCheckpointing, "policy"
            ),
            attention=attention,
            optimizer_states=expand("optimizer_states", optimizer_states, OptimizerStates, "dtype"),
            parameter_offload=parameter_offload,
            exact_accumulation=exact_accumulation,
            gradient_sync=gradient_sync,
            compile=compile,
            verify=verify,
            checkpoints=expand("checkpoints", checkpoints, Checkpoints, "format"),
            process_group_backend=process_group_backend,
            timeout=as_timedelta(timeout),
            start_method=start_method,
        )
        self._given_precision = precision_plugin
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._window = AccumulationWindow(exact=exact_accumulation)
        self._work = ModuleAtWork(self._window, self.undo)
        self._checkpoint = RunCheckpoint(self.config.checkpoints, self.broadcast, self.barrier)
        self._signals = DeferredSignals()
        self._skipped = SkippedSteps()
        self._reading = ReadableShards(self._shard_of, self._backward_by_hand)
        self._all_ranks_here = True  # or after an error: whether all have met it

    @override
    def __repr__(self) -> str:
        return lightning_compat.belonging(type(self).__name__)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a run, a copy (in hyper-parameters, say) is a strategy with the same settings that belongs to no run."""
        if self._context is None:
            return super().__reduce_ex__(protocol)
        settings = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return _with_settings, (type(self), {**settings, "precision_plugin": self._given_precision})

    # -- what users and Lightning ask --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What is sharded how, and the bytes per rank; known once the module has been set up.

        With tensor parallelism and pipelines that is in the first step, which shows what the blocks are called with.
        """
        if (plan := self._work.plan) is None:
            raise RuntimeError(
                "strategy.plan is known once the module has been set up (from on_fit_start on, with tensor parallelism"
                " and pipelines from the end of the first step on)"
            )
        pieces = self._work.pieces
        return plan if pieces is None else replace(plan, notes=(*plan.notes, *pieces.found))

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else EffiPrecision.from_stock(plugin)

    @property
    @override
    def precision(self) -> EffiPrecision:
        """The precision plugin, as what it is here."""
        plugin = self.precision_plugin
        assert isinstance(plugin, EffiPrecision)
        return plugin

    @property
    def last_grad_norm(self) -> Tensor | None:
        """Norm of the whole gradient before the last clipping by norm; ``None`` before the first."""
        return self.precision.last_grad_norm

    @property
    def engine(self) -> Engine:
        """Data parallelism at work; there once the module has been set up."""
        return self._work.state.engine

    @property
    @override
    def modules_here(self) -> Sequence[str] | None:
        if self.layout.pipeline == 1:
            return ("",)
        return None if self._work.stages is None else self._work.stages.modules

    # -- before the run: who takes part ------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        """Called at the end of the Trainer's construction, when the number of processes is known."""
        assert self.cluster_environment is not None
        self.resolve_layout()
        self._launcher = make_launcher(self, self.config.start_method)
        lightning_compat.allow_compiled_modules(self)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        asked = lightning_compat.precision_flag(model.trainer)
        if self._given_precision is not None and asked not in ("32-true", self.precision.precision):
            raise ValueError(
                f"Trainer(precision={asked!r}) and EffiStrategy(precision_plugin=...) with precision"
                f" {self.precision.precision!r} contradict each other. Give only one of them"
            )

    # -- set-up: intact module -> optimizers -> parts, at once or on the first batch ---------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._all_ranks_here = True
        self.accelerator.setup(trainer)
        self._checkpoint.refuse_remote(trainer)
        self.precision.use_device(self.root_device, self.context.groups.run.device)
        self.undo.push(self.precision.leave_run, "the precision plugin belongs to this run")
        if self.context.mesh is not None and (self.config.zero_stage or self.layout.tensor > 1):
            self.undo.push(install(self.context.mesh), "torch functions on DTensors of this run's mesh")
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if not self._work.is_left_over(module):
            self._checkpoint.remember(module)
            if self.layer_sync is not None:
                module = self.layer_sync.apply(module)  # type: ignore[assignment]
            self.model = self.precision.convert_module(module)
        elif fitting:
            self._work.rest()
        if fitting:
            self.setup_optimizers(trainer)
        self._work.set_up(self.context, module)
        self.setup_precision_plugin()
        self.barrier("setup")

    @override
    def model_to_device(self) -> None:
        """The engines move the module, block by block."""

    # -- a step ------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision.train_step_context():
            work = self._work.begin_step(self.lightning_module.training_step, args, kwargs)
        work.probe.before_first_step(self.lightning_module, work.engine, work.tensor.over, *args, **kwargs)
        if self._work.pieces is not None:
            return self._work.pieces(*args, **kwargs)
        manual = not self.lightning_module.automatic_optimization  # then the step itself looks at gradients
        with self.precision.train_step_context(), self._reading if manual else nullcontext():
            output = work.run_step(self.lightning_module.training_step, *args, **kwargs)
        if manual:
            factor = self.precision.move_scale(self.lightning_module)
            if factor != 1.0:
                self.engine.scale_gradients(factor)
        return output

    def _around_zero_grad(self) -> AbstractContextManager[object]:
        """Hooks between ``training_step`` and ``backward`` look at the gradients of the step before."""
        return self._reading if self._work.pieces is None else nullcontext()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._signals.before_evaluation_batch()
        with self.precision.val_step_context():
            return self._evaluate(self.lightning_module.validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision.test_step_context():
            return self._evaluate(self.lightning_module.test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision.predict_step_context():
            return self._evaluate(self.lightning_module.predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A step without backward: what it gathered must not outlive it, or a later load would be lost with it."""
        work = self._work.begin_step(step, args, kwargs)
        try:
            return work.run_step(step, *args, **kwargs)
        finally:
            self.engine.rest()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.accumulate():
            yield

    @override
    @for_processes
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision.pre_backward(closure_loss, self.lightning_module)
        with self._reading.paused():
            if self._work.pieces is not None and self._work.pieces.has_gradients:
                self._work.pieces.give_gradients()
            else:
                self.engine.before_backward(closure_loss)
                self.precision.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
                self.engine.after_backward()  # before on_after_backward, which post_backward calls
        self._window.count()
        with self._reading:  # on_after_backward looks at gradients
            closure_loss = self.precision.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _shard_of(self, parameter: Tensor) -> Tensor | None:
        return self.engine.shard_of(parameter)

    def _backward_by_hand(self, loss: Tensor, run: Callable[[], None]) -> None:
        """``loss.backward()`` instead of ``self.manual_backward(loss)``."""
        if self.precision.scaler is not None:
            raise RuntimeError(
                f"with precision={self.precision.precision!r} losses are multiplied by a scale before backward, which"
                " self.manual_backward(loss) does and loss.backward() does not: use the former"
            )
        self.engine.before_backward(loss)
        with self._reading.paused():
            run()
        self.engine.after_backward()

    @override
    @for_processes
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        model = model or self.lightning_module

        def closure_then_gradients() -> Any:
            result = closure()
            with self._reading.paused():
                self.engine.before_optimizer_step()
            self._window.close(self.lightning_module, optimizer, self.context.groups.data.control)
            return result

        try:
            return self.precision.optimizer_step(optimizer, model, closure_then_gradients, **kwargs)
        finally:
            self.engine.after_optimizer_step()

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        control_group = self.context.groups.run.control if self.context.has_several_processes else None
        self._signals.install(trainer, control_group, self.undo)
        self._skipped.install(trainer, self.precision)
        self.undo.push(self._skipped.remove, "schedulers and averages wait for skipped steps")
        around = lightning_compat.around_zero_grad(trainer, self._around_zero_grad)
        self.undo.push(around, "the trainer's loop around on_before_zero_grad and optimizer_zero_grad")

    # -- evaluation and data -----------------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._before_evaluation()

    @override
    def on_test_start(self) -> None:
        self._before_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._before_evaluation()

    def _before_evaluation(self) -> None:
        self.engine.rest()
        self.engine.sync_buffers()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return agree_on_length(dataloader, self.context.groups.data.control)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _held(self) -> Held:
        assert self.lightning_module is not None
        engine = self.engine if self._work.exists else None
        return Held(self._context, self.lightning_module, engine, self._work.stages, self.optimizers)

    @override
    @for_processes
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoint.model_state(self._held, after_error=self.is_interrupted)

    @override
    @for_processes
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoint.optimizer_state(self._held, optimizer)

    @override
    @for_processes
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._checkpoint.save(self._held, checkpoint, filepath, self.checkpoint_io, storage_options)

    @override
    @for_processes
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        group = self.context.groups.run.control
        return self._checkpoint.load(checkpoint_path, self.checkpoint_io, weights_only, group)

    @override
    @for_processes
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoint.load_model(self._held, checkpoint, strict)

    @override
    @for_processes
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoint.load_optimizers(self._held, checkpoint)

    # -- the end -----------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """``Trainer.init_module`` builds on the CPU.

        With ``empty_init=True`` parameters get their values in set-up, block by block, or from a checkpoint.
        """
        deferred = parameters_on_meta() if empty_init else nullcontext()
        with deferred, self.precision.tensor_init_context():
            yield

    def explain(self, exception: BaseException) -> bool:
        """Let ``exception`` say more where more is known about its cause; whether ranks had waited for each other."""
        if self.watch is not None and self.watch.explain(exception):
            return True
        self._work.explain(exception)
        return False

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.watch is not None:
            self.watch.note(exception)
        self._all_ranks_here = not self.explain(exception) and failed_together(self.board)
        if not self._all_ranks_here and not isinstance(exception, KeyboardInterrupt):
            end_other_processes(self.launcher)

    @override
    def teardown(self) -> None:
        """The module is an ordinary one again wherever the memory allows it, and the process is as it was.

        After an error that other ranks have not met, only what is this rank's own is taken back.
        """
        try:
            module = self.lightning_module
            if self._context is not None and module is not None:  # otherwise the run has not come to its set-up
                is_whole = self._work.end(self._context, module, all_ranks=self._all_ranks_here)
                if is_whole and self.layer_sync is not None:
                    self.layer_sync.revert(module)
        finally:
            self.leave_hooks()
            self.undo.run()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def is_interrupted(self) -> bool:
        """Whether the run ends in an error, when the other ranks may be gone."""
        if self._context is None:  # this process has no run: it started others and goes on after them
            return False
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("effi", cls, description="ZeRO sharding with all defaults (stage 2)")
        for stage in get_args(ZeroStage):
            strategy_registry.register(
                f"effi_zero{stage}", cls, description=f"ZeRO sharding, stage {stage}", zero_stage=stage
            )
        for tensor, stages in _NAMED_LAYOUTS:
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
            name = "_".join(["effi", *[f"tp{tensor}"] * (tensor > 1), *[f"pp{stages}"] * (stages > 1)])
            text = f"tensor parallelism over {tensor} ranks, {stages} pipeline stages, ZeRO stage 2 over the others"
            strategy_registry.register(name, cls, description=text, **sizes)


def _with_settings(strategy: type[EffiStrategy], settings: dict[str, Any]) -> EffiStrategy:
    return strategy(**settings)
