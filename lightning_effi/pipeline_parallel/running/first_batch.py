"""What the first batch shows of the whole module, which every rank still holds: one observed run, and a plan."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_effi.comm.agreement import Agreement
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.microbatches.logs import StepResult, captured_logs
from lightning_effi.microbatches.split import Piece, tensors
from lightning_effi.modules.parameters import describe_parameters
from lightning_effi.modules.restore import loss_of
from lightning_effi.modules.state_changes import changed_by
from lightning_effi.modules.trunk import find_trunk
from lightning_effi.pipeline_parallel.intercept import Interception
from lightning_effi.pipeline_parallel.planning.plan import PipelinePlan, plan_stages
from lightning_effi.pipeline_parallel.planning.timeline import Timeline
from lightning_effi.pipeline_parallel.planning.trace import Trace, trace_step
from lightning_effi.pipeline_parallel.running.randomness import StageRandomness
from lightning_effi.tensor_parallel.planning.plan import TensorPlan

if TYPE_CHECKING:
    from lightning_effi.context import RunContext
    from lightning_effi.tensor_parallel.run import TensorRun


@dataclass(frozen=True)
class Planned:
    """What the first batch has shown of the whole module.

    Attributes:
        pipeline: which stage runs what.
        tensor: how the blocks are split among the ranks of a stage, with tensor parallelism.
        trace: of the step.
        loss: of the whole module, which the stages must compute as well.
    """

    pipeline: PipelinePlan
    tensor: TensorPlan | None
    trace: Trace
    loss: float


class FirstBatch:
    """Runs the whole module on the first batch.

    Args:
        context: of the run.
        module: the user's, whole.
        tensor: of the ranks that hold a stage together.
        randomness: of the pipeline.

    Attributes:
        trunk: the module's blocks and units.
        interception: of these.
        result: of the observed run.
    """

    def __init__(self, context: RunContext, module: Any, tensor: TensorRun, randomness: StageRandomness) -> None:
        self._context, self._module, self._tensor, self._randomness = context, module, tensor, randomness
        self._agreement = Agreement(context.groups.run.control)
        self.trunk = find_trunk(module)
        self._tensor_plan: TensorPlan | None = None
        self._trace: Trace | None = None
        self.result = StepResult(None, None)
        self.interception: Interception

    @property
    def everywhere(self) -> set[str]:
        """All blocks and units."""
        return {*self.trunk.blocks, *self.trunk.units}

    def observe(self, piece: Piece, args: Sequence[Any]) -> list[str]:
        """Run the step and see what it does; returns what it changes besides gradients.

        Raises:
            ValueError: on all ranks, where the module cannot be cut; names what is in the way.
        """
        self._refuse_different_batches(piece.data)
        module = self._module
        self._tensor_plan = self._plan_tensor(piece, args)
        try:
            with computed_in(self._context.precision.compute, module):
                self.interception = Interception(module, self.trunk.blocks, self.trunk.units)
                changed = changed_by(module, lambda: self._observed(piece, args))
        except Exception as error:
            self._agree(error, None)
            raise
        self._agree(None, None)
        return changed

    def run(self, pieces: Sequence[Piece], args: Sequence[Any]) -> list[StepResult]:
        """The whole module's results, without gradients and dropout, with the same random numbers for all rows."""
        with computed_in(self._context.precision.compute, self._module), self._randomness.comparably():
            return [self._run(piece, args) for piece in pieces]

    def plan(
        self, timeline: Timeline, placement: tuple[int, ...], split: Sequence[int] | None, stages_per_rank: int
    ) -> Planned:
        """Decide which stage runs what.

        Raises:
            ValueError: on all ranks, where the module cannot be cut; names what is in the way.
        """
        module, trace = self._module, self._trace
        assert trace is not None

        def stages_of(sizes: Sequence[int] | int) -> Any:
            parameters = _parameters_below(module, (*self.trunk.blocks, *self.trunk.units))
            numels = {info.name: info.numel for info in describe_parameters(module)}
            return plan_stages(trace, parameters, numels, sizes, stages_per_rank)

        try:
            stages, boundaries, shared = stages_of(len(placement) if split is None else split)
        except Exception as error:
            self._agree(error, None)
            raise
        agreed = self._agree(None, (structure(trace), [len(stage.blocks) for stage in stages]))
        if agreed is not None:
            stages, boundaries, shared = stages_of(agreed)
        plan = PipelinePlan(stages, boundaries, shared, timeline, placement)
        loss = float("nan") if self.result.loss is None else float(self.result.loss)
        return Planned(plan, self._tensor_plan, trace, loss)

    def _observed(self, piece: Piece, args: Sequence[Any]) -> None:
        """The first of these runs is looked at; a second one, to see what changes again, is an ordinary one."""
        if self._trace is not None:
            self.run([piece], args)
            return
        with self._randomness.comparably(), self.interception.installed():
            self.result = self._run(piece, args, self._traced)

    def _traced(self, step: Callable[[], Any]) -> Any:
        self._trace, output = trace_step(self._module, self.trunk, self.interception, step)
        return output

    def _run(
        self, piece: Piece, args: Sequence[Any], through: Callable[[Callable[[], Any]], Any] | None = None
    ) -> StepResult:
        module = self._module
        with self._randomness.of_microbatch(0), captured_logs(module) as logged:
            output = (through or _call)(lambda: module.training_step(piece.data, *args))
        return StepResult(None if output is None else loss_of(output), output, logged)

    def _plan_tensor(self, piece: Piece, args: Sequence[Any]) -> TensorPlan | None:
        """How blocks are split among the ranks of a stage; found before anything stands between them and a step."""
        precision = self._context.precision
        if not self._tensor.is_pending:
            return None
        with torch.inference_mode(False), computed_in(precision.compute, self._module), precision.train_step_context():
            return self._tensor.plan(self._module, self._module.training_step, (piece.data, *args), {})

    def _agree(self, error: Exception | None, planned: tuple[Any, list[int]] | None) -> list[int] | None:
        """Nobody goes on where planning failed on one rank; pipelines whose batches balance differently cut alike.

        Args:
            error: why it failed here.
            planned: what the step calls, and how many blocks each stage has, once that is known.

        Returns:
            the blocks of each stage where those of this rank are not the ones to be used.

        Raises:
            RuntimeError: where another rank could not plan, or its step does something else.
        """
        everybody = self._agreement.gather((error and str(error), planned))
        failed = next((rank for rank, (message, _) in enumerate(everybody) if message is not None), None)
        if error is not None:
            return None
        if failed is not None:
            raise RuntimeError(f"pipeline: rank {failed} could not plan: {everybody[failed][0]}")
        if planned is None:
            return None
        first, sizes = everybody[0][1]
        if any(found[0] != first for _, found in everybody):
            raise RuntimeError(
                "pipeline: on the first batches of some ranks, training_step runs other blocks, or hands them other"
                " arguments, than on those of others. All steps must do the same. Use pipeline_parallel_size=1"
            )
        return None if sizes == planned[1] else sizes

    def _refuse_different_batches(self, batch: Any) -> None:
        """All stages must work on the same batch; a dataset that draws its own random numbers gives them others."""
        state = 0
        for tensor in tensors(batch).values():
            state = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), state)
        states = torch.tensor([state, -state])
        dist.all_reduce(states, dist.ReduceOp.MAX, group=self._context.groups.pipeline.control)
        if states[0] != -states[1]:
            raise RuntimeError(
                "pipeline: the ranks of one pipeline were given different batches. The dataset or its transforms must"
                " draw the same random numbers on all of them: seed with seed_everything(..., workers=True), and"
                " let data depend on strategy.data_parallel_rank, not on the global rank"
            )


def structure(trace: Trace) -> Any:
    """What must be the same in every step: blocks, their order, and where computed values are among their arguments."""
    return trace.blocks, trace.arguments


def _call(step: Callable[[], Any]) -> Any:
    return step()


def _parameters_below(module: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """First names of the parameters of each module named."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: [first[id(p)] for p in module.get_submodule(name).parameters()] for name in names}
