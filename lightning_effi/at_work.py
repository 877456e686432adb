"""The module of a run, from set-up to the end: waiting for its first batch, then at work in its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_effi.comm.agreement import Agreement
from lightning_effi.context import RunContext
from lightning_effi.data_parallel.engine import Engine
from lightning_effi.data_parallel.plan import shards
from lightning_effi.data_parallel.refuse import (
    refuse_averaging_of_shards,
    refuse_compiled_for_plain,
    refuse_pruning,
    refuse_unshardable,
)
from lightning_effi.gradients.window import AccumulationWindow
from lightning_effi.microbatches.retry import refuse_retry
from lightning_effi.microbatches.sequential import SequentialRunner
from lightning_effi.microbatches.step import MicrobatchedStep, refuse_uncuttable
from lightning_effi.modules.new_names import NewNames
from lightning_effi.modules.undo import Undo
from lightning_effi.parallelize import (
    FirstPiece,
    FirstStep,
    Parallelized,
    Waiting,
    abandon,
    follow,
    parallelize,
    set_up,
    take_apart,
)
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters
from lightning_effi.pipeline_parallel.verify import StageVerification
from lightning_effi.plan import Plan


class ModuleAtWork:
    """What a strategy holds of its module: nothing before set-up, then :class:`Waiting` or :class:`Parallelized`.

    Args:
        window: the batches between two optimizer steps.
        undo: told how to take back what is changed around the module.

    Attributes:
        plan: the last one that was made; ``None`` while a module waits for its first batch.
        pieces: carries out training steps where batches are cut into micro-batches.
    """

    def __init__(self, window: AccumulationWindow, undo: Undo) -> None:
        self._window = window
        self._undo = undo
        self._state: Waiting | Parallelized | None = None
        self._told = ""
        self.plan: Plan | None = None
        self.pieces: MicrobatchedStep | None = None

    @property
    def exists(self) -> bool:
        """Whether a module has been set up."""
        return self._state is not None

    @property
    def state(self) -> Waiting | Parallelized:
        """The module that has been set up."""
        assert self._state is not None
        return self._state

    @property
    def stages(self) -> StageParameters | None:
        """The parameters of this rank's pipeline stage, once there are stages."""
        return self._state.stages if isinstance(self._state, Parallelized) else None

    # -- set-up ------------------------------------------------------------------------------------------------------

    def is_left_over(self, module: pl.LightningModule) -> bool:
        """Whether ``module`` is in parts since an earlier run, which could not make it whole."""
        return isinstance(self._state, Parallelized) and self._state.module is module

    def rest(self) -> None:
        """Before a further fit of a module that is left over, so that its optimizers are given the shards.

        Raises:
            RuntimeError: where it is split into stages, of which no optimizer can be built.
        """
        if self.stages is not None:
            raise RuntimeError(
                f"{type(self.state.module).__name__} is still split into pipeline stages by an earlier fit, since the"
                " whole module does not fit into the memory of one process. Build it anew and load a checkpoint"
            )
        self.state.engine.rest()

    def set_up(self, context: RunContext, module: pl.LightningModule) -> None:
        """Take over a module, converted to the run's precision, and the optimizers that were built on it.

        Raises:
            ValueError: for what is known before the first batch to be impossible.
        """
        optimizers, self.pieces = module.trainer.optimizers, None
        _refuse(context, module, optimizers)
        if not self.is_left_over(module):
            self.plan = None
            waiting = set_up(context, module, self._tell, self._undo)
            # what fails here leaves the module intact, perhaps without values: there is nothing to take apart
            self._state = waiting if waiting.needs_batch else parallelize(waiting, optimizers, None)
        follow(context, module, self.state.engine, optimizers)
        if isinstance(self._state, Parallelized) or self.state.pipeline is not None:
            self._cut_batches()

    def _tell(self, plan: Plan) -> None:
        """Show a plan once, unless it has changed (another module, another optimizer)."""
        self.plan = plan
        if (text := str(plan)) != self._told:
            self._told = text
            rank_zero_info(text)

    # -- the first step ----------------------------------------------------------------------------------------------

    def begin_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Waiting | Parallelized:
        """A step hook is about to run; the first one shows how the module is used.

        A pipeline waits for the first micro-batch of a training step instead. A fit that checks its validation first
        does so with the whole module.
        """
        state = self.state
        state.tensor.begin_step(args)
        trainer = state.module.trainer
        shows_use = trainer.training or trainer.state.fn != TrainerFn.FITTING
        if isinstance(state, Waiting) and state.context.layout.pipeline == 1 and shows_use:
            self._state = parallelize(state, self._following, FirstStep(step, args, kwargs))
            self._refuse_new_names()
            self._cut_batches()
        return self.state

    @property
    def _following(self) -> Sequence[Optimizer]:
        """The optimizers that hold the module's parameters, whatever becomes of them in this run.

        A tensor-parallel evaluation finds those of an earlier fit, which hold the parts that the module had then.
        """
        trainer = self.state.module.trainer
        left_over = self.state.context.layout.tensor > 1 and trainer.state.fn != TrainerFn.FITTING
        return () if left_over else trainer.optimizers

    def _begin_pipeline(self, first: FirstPiece) -> Engine:
        state = self.state
        assert isinstance(state, Waiting)
        self._state = parallelize(state, state.module.trainer.optimizers, first)
        self._refuse_new_names()
        return self._state.engine

    def _refuse_new_names(self) -> None:
        layout = self.state.context.layout
        axis, size = ("pipeline", layout.pipeline) if layout.pipeline > 1 else ("tensor", layout.tensor)
        NewNames(self.state.module, f"{axis}_parallel_size={size}", self._undo)

    def _cut_batches(self) -> None:
        """Training steps are carried out in micro-batches where that is asked for; else each batch is one piece."""
        state = self.state
        context, module = state.context, state.module
        if module.trainer.state.fn != TrainerFn.FITTING or not _cuts_batches(context):
            return
        stages, count = context.layout.pipeline, context.config.microbatches.count
        if count == "auto":
            count = 3 * stages if stages > 1 else 1
        agreement = Agreement(context.groups.run.control) if context.has_several_processes else None
        if state.pipeline is None:
            alone = context.layout.data_parallel_size == 1
            runner = SequentialRunner(
                module, state.engine, state.tensor.over, context.precision, alone=alone, agreement=agreement
            )
            self.pieces = MicrobatchedStep(context, module, state.engine, self._window, runner, count, agreement)
            return
        verify = context.layout.tensor > 1 if context.config.verify == "auto" else context.config.verify
        self.pieces = MicrobatchedStep(
            context,
            module,
            state.engine,
            self._window,
            state.pipeline,
            count,
            agreement,
            lambda piece, args, pieces: self._begin_pipeline(FirstPiece(piece, args, pieces)),
            StageVerification(context, module, state.pipeline) if verify else None,
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def explain(self, exception: BaseException) -> None:
        """Add notes to ``exception`` where more is known about its cause."""
        if self._state is not None:
            self._state.engine.explain(exception)
            self._state.tensor.explain(exception)

    def end(self, context: RunContext, module: pl.LightningModule, *, all_ranks: bool) -> bool:
        """A run is over.

        Args:
            context: of the run.
            module: of the run.
            all_ranks: whether all ranks are here; otherwise only what asks nobody is taken back.

        Returns:
            whether the module is an ordinary one again.
        """
        state = self._state
        if state is None:  # set-up has failed, and left the module as it was converted
            context.precision.release(module)
            return True
        if isinstance(state, Parallelized) and not all_ranks:
            abandon(state)
            self._state = None
            return False
        if not take_apart(state, self._following):
            return False
        self._state = None
        return True


def _refuse(context: RunContext, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
    config, layout, trainer = context.config, context.layout, module.trainer
    if layout.pipeline > 1:
        refuse_averaging_of_shards(trainer, f"pipeline_parallel_size={layout.pipeline}")
        refuse_pruning(trainer, f"pipeline_parallel_size={layout.pipeline}")
    if layout.tensor > 1:
        refuse_unshardable(optimizers, f"tensor_parallel_size={layout.tensor}")
        refuse_averaging_of_shards(trainer, f"tensor_parallel_size={layout.tensor}")
        refuse_pruning(trainer, f"tensor_parallel_size={layout.tensor}")
    if shards(layout, config.zero_stage, context.precision.compute):
        refuse_unshardable(optimizers, f"zero_stage={config.zero_stage}")
        refuse_compiled_for_plain(optimizers, f"zero_stage={config.zero_stage}")
        refuse_averaging_of_shards(trainer, f"zero_stage={config.zero_stage}")
    if trainer.state.fn == TrainerFn.FITTING and _cuts_batches(context):
        refuse_uncuttable(module, config)
        refuse_retry(config, layout.data_parallel_size)


def _cuts_batches(context: RunContext) -> bool:
    """A mean over labels spans windows and ranks, and running out of memory may call for more pieces."""
    asked = context.config.microbatches
    several = asked.count not in ("auto", 1) or context.layout.pipeline > 1
    return several or asked.weight == "valid_labels" or asked.oom_retry
